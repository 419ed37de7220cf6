"""`bench serving` and `bench jitter` on a tiny model: what the files say, and that wrong answers end them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.bench.stage import RowCounter
from deepinfer_core.bench.workload import passage, repeated
from deepinfer_core.cli.main import main
from deepinfer_core.llm import LLM
from deepinfer_core.plugin_api import AttentionBatch

POLICIES = ["dual_stream", "mixed", "serial", "slo", "time_sliced"]
SMALL = ["--device", "cpu", "--iterations", "2", "--max-cache", "256"]
SERVING = [*SMALL, "--prompt-tokens", "40", "--max-new-tokens", "6", "--requests-per-client", "2"]
JITTER = [*SMALL, "--long-repeat", "1", "--streams", "2", "--max-new-tokens", "24", "--insert-after", "4"]


def bench(kind: str, model: Path, tmp_path: Path, *flags: str) -> dict[str, Any]:
    output = tmp_path / "result.json"
    common = SERVING if kind == "serving" else JITTER
    assert main(["bench", kind, str(model), *common, "--output", str(output), *flags]) == 0
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def test_serving_measures_each_policy_at_each_concurrency(tiny_chat_model: Path, tmp_path: Path) -> None:
    result = bench("serving", tiny_chat_model, tmp_path, "--policy", "all", "--concurrency", "1,3")
    rows = result["rows"]
    assert [(row["concurrency"], row["policy"]) for row in rows] == [(n, p) for n in (1, 3) for p in POLICIES]
    for row in rows:
        assert len(row["runs"]) == 2
        assert len(row["token_times_ms"]) == 2 * row["concurrency"]
        assert all(len(times) == 6 for times in row["token_times_ms"])
        assert (row["prompt_tokens"], row["new_tokens"]) == (40, 6)
        for name in ("tok_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "jitter_ms"):
            assert math.isfinite(row[name])
            assert min(run[name] for run in row["runs"]) <= row[name] <= max(run[name] for run in row["runs"])
            assert row["spread"][name] >= 0
        assert row["tok_s"] > 0
        assert row["cached_tokens_total"] == 0
        assert row["prefill_decode_overlap"] is True
        assert row["prefill_decode_stream_overlap_steps"] == 0
        kernels = {kernel for layer in row["path"] for kernel in layer["kernels"].values()}
        assert kernels == {"fp16.matmul_cpu"}
    assert all(row["prefill_decode_overlap_steps"] == 0 for row in rows if row["concurrency"] == 1)
    meta = result["meta"]
    assert (meta["bench"], meta["device"], meta["max_model_len"], meta["prefix_cache"]) == ("serving", "cpu", 256, True)
    assert meta["model"]["name"] == tiny_chat_model.name
    assert meta["dtype"] == "float32"


def test_serving_flags_reach_the_engine(tiny_chat_model: Path, tmp_path: Path) -> None:
    flags = ["--policy", "dual_stream", "--policy", "serial,serial", "--concurrency", "3"]
    flags += ["--prefill-chunk-tokens", "16", "--no-prefix-cache", "--no-prefill-decode-overlap"]
    flags += ["--reserve-memory-mb", "64", "--backend", "attention=sdpa"]
    result = bench("serving", tiny_chat_model, tmp_path, *flags)
    assert [row["policy"] for row in result["rows"]] == ["dual_stream", "serial"]
    assert result["meta"]["prefix_cache"] is False
    for row in result["rows"]:
        assert row["prefill_decode_overlap"] is False
        assert row["prefill_chunk_tokens"] == 16
        assert row["prefill_steps_total"] >= 6 * math.ceil(40 / 16)
        assert row["prefill_decode_overlap_steps"] > 0
        assert row["prefill_decode_stream_overlap_steps"] == 0


def test_jitter_inserts_a_long_prompt_into_running_streams(tiny_chat_model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "jitter.png"
    flags = ["--policy", "all", "--chunk-sizes", "32,512", "--plot", str(picture)]
    result = bench("jitter", tiny_chat_model, tmp_path, *flags)
    rows, meta = result["rows"], result["meta"]
    assert [(row["prefill_chunk_tokens"], row["policy"]) for row in rows] == [
        (n, p) for n in (32, 512) for p in POLICIES
    ]
    assert meta["long_prompt_tokens"] > 128
    for row in rows:
        assert row["concurrency"] == 2
        assert all(len(times) == 24 for times in row["token_times_ms"])
        assert len(row["long_token_times_ms"]) == 8
        assert 0 < row["itl_ms_p50"] <= row["itl_ms_p99"] <= row["itl_ms_max"]
        assert row["jitter_ms"] >= 0
        assert row["long_ttft_ms"] > 0
        assert row["prefill_decode_overlap_steps"] > 0
    (serial,) = [row for row in rows if (row["policy"], row["prefill_chunk_tokens"]) == ("serial", 32)]
    assert serial["prefill_steps_total"] == 2 + math.ceil(meta["long_prompt_tokens"] / 32)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_of_a_config_are_for_the_policy_that_it_names(tiny_chat_model: Path, tmp_path: Path) -> None:
    flags = ["--scheduler.options.chunk_tokens", "16", "--concurrency", "1"]
    result = bench("serving", tiny_chat_model, tmp_path, *flags, "--scheduler.policy=mixed", "--policy", "serial,mixed")
    assert [(row["options"], row["prefill_steps_total"]) for row in result["rows"]] == [
        ({}, 2),
        ({"chunk_tokens": 16}, 6),
    ]
    result = bench("serving", tiny_chat_model, tmp_path, *flags, "--policy", "serial")
    assert result["rows"][0]["prefill_steps_total"] == 6


@pytest.mark.parametrize(
    ("command", "message", "code"),
    [
        (["serving", "--policy", "serail"], "did you mean 'serial'", 4),
        (["serving", "--concurrency", "1,x"], "--concurrency 'x' is not a positive whole number", 2),
        (["serving", "--concurrency", ","], "--concurrency is empty", 2),
        (["serving", "--concurrency", "65"], "max_requests = 64", 2),
        (["serving", "--prompt-tokens", "300"], "max_model_len is 256", 7),
        (["jitter", "--long-repeat", "3"], "max_model_len is 256", 7),
        (["jitter", "--insert-after", "30"], "after 30 of 24 tokens", 2),
        (["jitter", "--chunk-sizes", "4096"], "max_batched_tokens = 2048", 2),
        (["serving", "--policy", "serial,slo", "--scheduler.options.slice_ms=9"], "say whose options these are", 2),
    ],
)
def test_a_mistake_is_one_clear_text(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str, code: int
) -> None:
    kind, *flags = command
    common = SERVING if kind == "serving" else JITTER
    assert main(["bench", kind, str(tiny_chat_model), *common, *flags]) == code
    assert message in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "jitter", str(tiny_chat_model), *JITTER, "--plot", str(tmp_path / "x.png")]) == 1
    out, err = capsys.readouterr()
    assert "deepinfer-core[bench]" in err
    assert not out


class Spoiled(RowCounter):
    """Does to the logits, or instead of the forward, what a test says, from the given forward on."""

    after = 0
    calls = 0

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[dict[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        logits = super().forward(tokens, batch, kv, logit_rows)
        Spoiled.calls += 1
        return self.spoil(logits) if Spoiled.calls > Spoiled.after else logits

    def spoil(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Failing(Spoiled):
    def spoil(self, logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the card is on fire")


class Lying(Spoiled):
    def spoil(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits


@pytest.mark.parametrize(
    ("counter", "message"), [(Failing, "the card is on fire"), (Lying, "the model puts them")], ids=["failed", "wrong"]
)
@pytest.mark.parametrize("kind", ["serving", "jitter"])
def test_a_request_that_fails_or_answers_wrong_ends_the_bench(
    tiny_chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    counter: type[Spoiled],
    message: str,
) -> None:
    monkeypatch.setattr("deepinfer_core.bench.stage.RowCounter", counter)
    monkeypatch.setattr(Spoiled, "calls", 0)
    # The first policy's warm-up is right: it says what the others must answer.
    monkeypatch.setattr(Spoiled, "after", 12 if kind == "serving" else 30)
    output = tmp_path / "result.json"
    common = [*(SERVING if kind == "serving" else JITTER), "--policy", "serial,mixed", "--output", str(output)]
    assert main(["bench", kind, str(tiny_chat_model), *common]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "policy " in err
    assert not output.exists()


def test_a_policy_that_breaks_a_rule_ends_the_bench(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_policies.serial import Serial

    def plan(self: Serial, view: Any) -> Any:
        raise RuntimeError("out of plans")

    monkeypatch.setattr(Serial, "plan", plan)
    assert main(["bench", "serving", str(tiny_chat_model), *SERVING, "--policy", "serial", "--concurrency", "1"]) == 1
    assert "out of plans" in capsys.readouterr().err


def test_prompts_have_their_length_and_begin_differently(tiny_chat_model: Path) -> None:
    tokenizer = LLM(tiny_chat_model, device="cpu").tokenizer
    for tokens in (1, 40, 300, 9000):
        assert len(passage(tokenizer, "0.0", 0, tokens)) == tokens
    prompts = [passage(tokenizer, f"{run}.{i}", i, 64) for run in range(3) for i in range(4)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)
    assert passage(tokenizer, "0.0", 5, 64) == passage(tokenizer, "0.0", 5, 64)
    once, twice, thrice = (len(repeated(tokenizer, "0", times)) for times in (1, 2, 3))
    assert twice - once == thrice - twice > 100


def test_policy_and_a_scheduler_mapping_are_both_kept(tiny_chat_model: Path) -> None:
    llm = LLM(tiny_chat_model, device="cpu", policy="slo", scheduler={"options": {"max_itl_ms": 80}, "max_requests": 3})
    assert llm.running.engine.status()["policy"] == "slo"
    assert llm.running.config.scheduler.options == {"max_itl_ms": 80}
    assert llm.running.engine.limits.max_requests == 3
