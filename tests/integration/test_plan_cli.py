"""``deepinfer plan``: what fits on a card that is not here, from a config.json alone, and the knob that helps."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli.main import main

W4 = {"scheme": "w4a16", "group_size": 128, "zeros": False}
W3 = {"scheme": "w3a16", "group_size": 128, "zeros": False}


@pytest.fixture(scope="module")
def three_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with nothing but the config of a 3B model in mixed W4 and W3."""
    path = tmp_path_factory.mktemp("plan") / "three-billion"
    path.mkdir()
    layers = {"model.layers.*.self_attn.*": W4, "model.layers.*.mlp.*": W3}
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "deepinfer", "format_version": 1, "layers": layers},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def _plan(capsys: pytest.CaptureFixture[str], model: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    card = ["--vram", "4G", "--capability", "86", "--dtype", "float16"]
    assert main(["plan", str(model), *card, "--json", *flags]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_3b_model_fits_a_4_gb_card_with_a_shorter_context(
    three_billion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(capsys, three_billion)
    codes = 36 * 3 * 2048 * 11008 * 3 // 8 + 36 * 3 * 2048 * 11008 // 128 * 2
    assert plan["weights"]["w3a16 in groups of 128, 108 layers"] == codes
    assert plan["kv"]["bytes_per_token"] == 36 * 2 * 2 * 128 * 2
    taken = plan["weight_bytes"] + sum(plan["kept"].values()) + plan["step"]["total"]
    page = plan["kv"]["page_bytes"]
    left = plan["total"] - taken - plan["kv"]["pages"] * page
    assert plan["total"] == 4 << 30
    assert 0 <= left < page, "all that is left is cache, to the page"
    assert 8192 < plan["kv"]["max_model_len"] < 32768


def test_every_knob_does_what_it_promises(three_billion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    knobs = {knob["flag"]: knob["tokens"] for knob in _plan(capsys, three_billion)["knobs"]}
    assert knobs
    assert {"--attention.kv_dtype int8", "--scheduler.max_requests 16"} <= set(knobs)
    for flag, tokens in knobs.items():
        words = flag.partition(" (")[0].split()
        assert _plan(capsys, three_billion, *words)["kv"]["pages"] * 16 == tokens


def test_what_cannot_fit_is_exit_code_7_and_says_by_how_much(
    three_billion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(three_billion), "--vram", "2G", "--capability", "86"]) == 7
    out, err = capsys.readouterr()
    assert "w3a16 in groups of 128" in out
    assert "MiB too few" in err


def test_an_asked_context_that_does_not_fit_names_the_knob(
    three_billion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(capsys, three_billion, "--max-model-len", "32768", code=7)
    assert "a context of 32768 tokens needs" in plan["problem"]
    assert any("max-model-len" in knob["flag"] for knob in plan["knobs"])


def test_text_says_what_fits(three_billion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(three_billion), "--vram", "4G", "--capability", "8.6"]) == 0
    out = capsys.readouterr().out
    assert "shrunk from the model's 32,768 to what fits" in out
    assert "To make more room" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vram", "lots"], "--vram 'lots'"),
        (["--capability", "86"], "--vram 4G"),
        (["--max-model-len", "99999", "--vram", "4G"], "32768"),
        (["--device", "cpu", "--capability", "86"], "leave one out"),
    ],
)
def test_mistakes_are_usage_errors(
    three_billion: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["plan", str(three_billion), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_cpu_is_planned_by_the_rule_that_serve_follows(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepinfer_core.llm import LLM

    assert main(["plan", str(tiny_chat_model), "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    running = LLM(tiny_chat_model, device="cpu").running
    assert plan["kv"]["pages"] == running.cache.total_pages
    assert plan["weight_bytes"] == running.decoder.nbytes
