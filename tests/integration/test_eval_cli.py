"""``deepinfer eval``: the same perplexity as transformers gives, and agreement counted token by token."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepinfer_core.cli.main import main

TEXT = "The sea is wide, and the night is long. " * 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def w3_model(tiny_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "w3"
    assert main(["quantize", str(tiny_chat_model), str(path), "--recipe", "w3", "--perplexity", "off"]) == 0
    return path


def _eval(model: Path, text: Path, *flags: str) -> dict[str, Any]:
    output = text.with_suffix(".json")
    base = ["eval", str(model), "--text", str(text), "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    assert main([*base, *flags]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _reference(model: Path, window: int) -> tuple[float, list[int]]:
    """Return perplexity and the likeliest next tokens as transformers computes them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gc.collect()  # files that transformers left open
    ids = tokenizer.encode(TEXT)
    total, count, likeliest = 0.0, 0, list[int]()
    for begin in range(0, len(ids), window):
        part = torch.tensor([ids[begin : begin + window]])
        if part.shape[1] < 2:
            continue
        with torch.inference_mode():
            logits = reference(part).logits[0, :-1]
        total -= float(logits.log_softmax(-1).gather(1, part[0, 1:, None]).double().sum())
        count += part.shape[1] - 1
        likeliest += logits.argmax(-1).tolist()
    return math.exp(total / count), likeliest


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # transformers leaves a file open
def test_perplexity_is_that_of_transformers(tiny_chat_model: Path, text: Path) -> None:
    found = _eval(tiny_chat_model, text, "--window", "64")
    expected, likeliest = _reference(tiny_chat_model, 64)
    (row,) = found["models"]
    assert row["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert row["tokens"] == len(likeliest)
    assert found["window"] == 64


def test_a_model_agrees_with_itself(tiny_chat_model: Path, text: Path) -> None:
    found = _eval(tiny_chat_model, text, "--against", str(tiny_chat_model))
    assert found["top1_agreement"] == 1.0
    assert found["perplexity_ratio"] == 1.0


def test_three_bits_agree_less_and_by_count(
    tiny_chat_model: Path, w3_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _eval(w3_model, text, "--against", str(tiny_chat_model), "--max-tokens", "200")
    assert 0.1 < found["top1_agreement"] < 1
    assert found["top1_same"] == round(found["top1_agreement"] * found["models"][0]["tokens"])
    assert [row["tokens"] for row in found["models"]] == [199, 199]
    assert "the likeliest next token is the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "flags", "code", "message"),
    [
        ("", [], 2, "needs at least 2"),
        ("some text", ["--text", "no/such/file"], 2, "cannot be read"),
        ("some text", ["--window", "1"], 2, "--window"),
    ],
)
def test_mistakes(
    tiny_chat_model: Path, text: Path, capsys: pytest.CaptureFixture[str],
    content: str, flags: list[str], code: int, message: str,
) -> None:  # fmt: skip
    text.write_text(content, encoding="utf-8")
    assert main(["eval", str(tiny_chat_model), "--text", str(text), "--device", "cpu", *flags]) == code
    assert message in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    tiny_chat_model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_chat_model, other)
    file = other / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(data), encoding="utf-8")
    base = ["eval", str(tiny_chat_model), "--text", str(text), "--device", "cpu", "--against", str(other)]
    assert main(base) == 2
    assert "different tokenizers" in capsys.readouterr().err
