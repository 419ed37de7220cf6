"""A kernel bench whose results are wrong fails, and says which."""

import pytest

from deepinfer_core.bench.linear import ROW_KEY, merged, require_right
from deepinfer_core.bench.results import BenchError
from deepinfer_core.cli.main import main
from deepinfer_core.errors import KernelError


def row(kernel: str, *, correct: bool) -> dict[str, object]:
    return {"kernel": kernel, "m": 8, "n": 64, "k": 128, "act_dtype": "float16", "rel_err": 1e-4 if correct else 0.5}


def test_right_rows_pass_and_the_first_wrong_one_is_named() -> None:
    require_right({"rows": [row("a", correct=True)]})
    with pytest.raises(KernelError, match=r"2 of 3 rows are wrong, the first: b at 8 x 64 x 128 .* 5\.0e-01"):
        require_right({"rows": [row("a", correct=True), row("b", correct=False), row("c", correct=False)]})


def test_no_scheme_is_an_error_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "linear", "--scheme", ","]) == 2
    assert "names none" in capsys.readouterr().err


def result(us: float, *, device: str = "card", **cell: object) -> dict[str, object]:
    plain = {"scheme": "w4a16", "m": 1, "n": 2, "k": 3, "group_size": 128, "zeros": False, "act_dtype": "float16"}
    meta = {"device": device, "date": f"day {us}", "commit": "c", "command": "x", "read_gbs": 1}
    return {"meta": meta, "rows": [{**dict.fromkeys(ROW_KEY), **plain, **cell, "us": us}]}


def test_merging_keeps_other_cells_replaces_equal_ones_and_remembers_the_earlier_run() -> None:
    both = merged(result(1.0, kernel="a"), result(2.0, kernel="b"))
    assert [row["us"] for row in both["rows"]] == [1.0, 2.0]
    again = merged(both, result(3.0, kernel="a"))
    assert sorted(row["us"] for row in again["rows"]) == [2.0, 3.0]
    assert [run["date"] for run in again["meta"]["earlier"]] == ["day 1.0", "day 2.0"]
    assert again["meta"]["date"] == "day 3.0"
    with pytest.raises(BenchError, match="of card, this run is of other"):
        merged(both, result(1.0, device="other", kernel="a"))


def test_merging_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "linear", "--merge"]) == 2
    assert "--output" in capsys.readouterr().err
