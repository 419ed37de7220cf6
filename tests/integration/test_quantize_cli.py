"""``deepinfer quantize`` as a user meets it: a table, a report, one clear text for each mistake, Ctrl-C."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.checkpoint.writer import TensorWriter
from deepinfer_core.cli.main import main
from deepinfer_core.errors import CapacityError
from deepinfer_core.llm import LLM
from deepinfer_core.sampling import SamplingParams


def test_table_and_perplexity_are_printed_and_kept(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mixed"
    assert main(["quantize", str(tiny_chat_model), str(target), "--recipe", "mixed", "--group-size", "32"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.up_proj" in out
    assert "w3a16 g32" in out
    assert "w4a16 g32" in out
    report = json.loads((target / "quantization_report.json").read_text())
    measured = report["perplexity"]
    assert f"source {measured['source']:.3f}, result {measured['result']:.3f}" in out
    assert measured["tokens"] > 3000
    assert measured["ratio"] == pytest.approx(measured["result"] / measured["source"])
    assert measured["result"] != measured["source"]
    (output,) = LLM(target, device="cpu").generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_perplexity_and_overwriting_are_chosen_by_flags(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(tiny_chat_model), str(tmp_path / "w4"), "-r", "w4", "--perplexity", "off"]
    assert main([*command, "--method", "rtn", "--zeros", "on", "--group-size", "-1"]) == 0
    assert "perplexity over" not in capsys.readouterr().out
    report = json.loads((tmp_path / "w4" / "quantization_report.json").read_text())
    assert (report["perplexity"], report["method"]) == (None, "rtn")
    form = open_checkpoint(tmp_path / "w4").layer_format("model.layers.0.mlp.up_proj")
    assert (form.group_size, form.zeros) == (-1, True)
    assert main(command) == 5
    assert "is not empty; choose another directory or pass --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert not open_checkpoint(tmp_path / "w4").layer_format("model.layers.0.mlp.up_proj").zeros


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--recipe", "w5"], 4, "recipe 'w5'"),
        (["--recipe", "mixd"], 4, "did you mean 'mixed'"),
        (["--recipe", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
        (["--recipe", "w4", "--group-size", "48"], 2, "cannot hold groups of 48; possible: 32, 64, 128, -1"),
        (["--recipe", "w4", "--group-size", "many"], 2, "--group-size 'many': write auto"),
        (["--recipe", "w4", "--zeros", "yes"], 2, "--zeros 'yes': write auto, on or off"),
        (["--recipe", "w4", "--method", "best"], 2, "best"),
        ([], 2, "recipe"),
    ],
)
def test_a_mistake_is_one_text_an_exit_code_and_nothing_written(
    tiny_chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    message: str,
) -> None:
    assert main(["quantize", str(tiny_chat_model), str(tmp_path / "result"), *flags]) == code
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_model_too_large_to_run_here_is_converted_all_the_same(
    tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise CapacityError("no room for it")

    monkeypatch.setattr("deepinfer_core.llm.LLM", refuse)
    command = ["quantize", str(tiny_chat_model), str(tmp_path / "w4"), "-r", "w4", "--overwrite"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "perplexity was not measured: no room for it" in err
    assert "perplexity over" not in out
    assert main([*command, "--perplexity", "on"]) == 7
    assert open_checkpoint(tmp_path / "w4").kind == "deepinfer"


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_cut_source_is_named_with_its_sizes_and_nothing_is_written(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    """MF-02: no traceback, exit code not 0, no output that later loads."""
    source = tmp_path / "source"
    shutil.copytree(tiny_chat_model, source)
    weights = source / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-cut])
    for command in (
        ["quantize", str(source), str(tmp_path / "result"), "-r", "w4"],
        ["generate", str(source), "-p", "x"],
    ):
        assert main(command) == 5
        err = capsys.readouterr().err
        assert f"{weights} is cut: its header describes {size} bytes, the file has {size - cut}" in err
        assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_ctrl_c_exits_130_and_leaves_nothing(
    tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put, calls = TensorWriter.put, []

    def interrupted(self: TensorWriter, name: str, tensor: object) -> None:
        calls.append(name)
        if len(calls) == 7:
            raise KeyboardInterrupt
        put(self, name, tensor)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorWriter, "put", interrupted)
    assert main(["quantize", str(tiny_chat_model), str(tmp_path / "result"), "-r", "w4"]) == 130
    assert len(calls) == 7
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
