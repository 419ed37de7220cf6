"""``explain``: for a model's files, for a layer that is only named, for a card that is not here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli import explain
from deepinfer_core.cli.cuda_driver import Card, Driver
from deepinfer_core.cli.main import main
from deepinfer_core.kernels.cubin_cache import cache_directory
from deepinfer_core.registry.tuning import Timing, Timings, timings_path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}
MIXED = {
    "quant_method": "deepinfer",
    "format_version": 1,
    "layers": {
        pattern: {"scheme": scheme, "group_size": 32, "zeros": False, "distribution": f"deepinfer-plugin-{scheme}"}
        for pattern, scheme in (("*.self_attn.*", "w4a16"), ("*.mlp.*", "w3a16"))
    },
}


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(explain, "ask_driver", lambda: Driver(problem="no driver"))
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))


def config_only(tmp_path: Path, quantization: Any = None, **changes: Any) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    config = LLAMA | changes | ({"quantization_config": quantization} if quantization is not None else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_config_json_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = explained(capsys, config_only(tmp_path, MIXED), "--device", "cpu", "--dtype", "float32")
    shapes = {(e["scheme"], e["n"], e["k"]): e["layers"] for e in data["layers"]}
    assert set(shapes) == {
        ("w4a16", 512, 256), ("w4a16", 256, 256), ("w3a16", 1024, 256), ("w3a16", 256, 512), ("fp16", 512, 256),
    }  # fmt: skip
    assert shapes["w4a16", 512, 256] == ["layers.0.qkv", "layers.1.qkv", "layers.2.qkv"]
    for layer in data["layers"]:
        assert layer["rows"][0]["m_from"] == 1
        assert layer["rows"][-1]["m_to"] == 2048
        assert all(rejected["reason"] for rejected in layer["rejected"])
    assert data["attention"]["backend"] == "sdpa"


def test_dtype_auto_is_resolved_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = explained(capsys, config_only(tmp_path, MIXED), "--device", "cpu")
    assert data["dtype"] in ("bfloat16", "float32")
    assert {layer["dtype"] for layer in data["layers"]} == {data["dtype"]}


@pytest.mark.parametrize("capability", ["86", "8.6", "sm_86"])
def test_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str], capability: str) -> None:
    data = explained(
        capsys, "--shape", "1536x576", "--group-size", "32", "--capability", capability, "--dtype", "float16"
    )
    assert (data["device"], data["capability"], data["device_name"]) == ("cuda", "8.6", None)
    assert {e["capability"] for e in data["layers"]} == {"8.6"}


def test_the_card_that_is_here_is_the_default_and_its_measured_table_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card(name="RTX 3050", capability=(8, 6), memory=4 << 30)
    monkeypatch.setattr(explain, "ask_driver", lambda: Driver(cards=(card,), cuda=(12, 4)))
    arguments = ("--shape", "1536x576", "--group-size", "32", "--dtype", "float16")
    first = explained(capsys, *arguments)["layers"][0]["rows"][0]
    assert first["measured_us"] is None
    timing = Timing(
        problem="w4a16 g32 1536x576 float16 none cuda sm_86",
        kernel=first["kernel"],
        version=first["version"],
        m=1,
        us=12.5,
    )
    Timings(card.name, (timing,)).write(timings_path(card.name, cache_directory()))
    data = explained(capsys, *arguments)
    assert data["tuned"]
    assert data["layers"][0]["rows"][0]["measured_us"] == 12.5
    assert main(["explain", *arguments]) == 0
    assert re.search(r"w4a16\S+ .* 12\.5 ", capsys.readouterr().out)


def test_the_printed_table_names_ranges_kernels_and_rejections(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", "--shape", "1536x576", "--group-size", "32", "--capability", "86", "--dtype", "float16"]) == 0
    )
    printed = capsys.readouterr().out
    for part in ("w4a16 1536 x 576, group 32", "deepinfer-plugin-w4a16", "cuda sm_86", "float16", "untuned", "  not "):
        assert part in printed


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ([], 2, "nothing to explain"),
        (["--shape", "64by64"], 2, "write outputs x inputs"),
        (["--shape", "0x64"], 2, "--shape '0x64' is not a shape"),
        (["--shape", "64x64", "--capability", "abc"], 2, "'abc' is not a compute capability"),
        (["--shape", "64x64", "--device", "cuda"], 2, "such as --capability 86"),
        (["--shape", "64x64", "--device", "cpu", "--capability", "86"], 2, "leave one out"),
        (["--shape", "64x64", "--dtype", "fp16"], 2, "did you mean 'float16'"),
        (["--shape", "64x64", "--scheme", "w4b16"], 4, "did you mean 'w4a16'"),
        (["--shape", "64x64", "--set", "linear.w4a16.kernels.1=w4a16.gem"], 4, "did you mean 'w4a16.gemv'"),
        (["no-such-model"], 5, "no-such-model does not exist"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_error(
    arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == code
    printed = capsys.readouterr()
    assert part in printed.err
    assert "Traceback" not in printed.err


def test_a_scheme_that_nobody_serves_is_told_beside_the_layers_that_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"*.mlp.*": {"scheme": "acme5", "group_size": 32, "zeros": False, "distribution": "acme-deepinfer"}}
    model = config_only(tmp_path, MIXED | {"layers": layers})
    assert main(["explain", model, "--device", "cpu", "--dtype", "float32", "--json"]) == 4
    printed = capsys.readouterr()
    by_scheme = {e["scheme"]: e["error"] for e in json.loads(printed.out)["layers"]}
    assert by_scheme["fp16"] is None
    assert "'acme5'" in by_scheme["acme5"]
    assert "acme5" in printed.err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "cannot be read"),
        ("[]", "expected a JSON object"),
        (json.dumps(LLAMA | {"architectures": ["GPT9"], "model_type": "gpt9"}), "gpt9"),
        (json.dumps(LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}), "AWQ"),
        (json.dumps(LLAMA | {"quantization_config": MIXED | {"format_version": 2}}), "format_version 2"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(
    tmp_path: Path, content: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert main(["explain", str(tmp_path)]) == 5
    assert part.lower() in capsys.readouterr().err.lower()
