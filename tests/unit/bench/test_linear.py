"""A kernel bench whose results are wrong fails, and says which."""

import pytest

from deepinfer_core.bench.linear import require_right
from deepinfer_core.cli.main import main
from deepinfer_core.errors import KernelError


def row(kernel: str, *, correct: bool) -> dict[str, object]:
    return {"kernel": kernel, "m": 8, "n": 64, "k": 128, "rel_err": 0.5 if not correct else 1e-4, "correct": correct}


def test_right_rows_pass_and_the_first_wrong_one_is_named() -> None:
    require_right({"rows": [row("a", correct=True)]})
    with pytest.raises(KernelError, match=r"2 of 3 rows are wrong, the first: b at 8 x 64 x 128 .* 5\.0e-01"):
        require_right({"rows": [row("a", correct=True), row("b", correct=False), row("c", correct=False)]})


def test_no_scheme_is_an_error_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "linear", "--scheme", ","]) == 2
    assert "names none" in capsys.readouterr().err
