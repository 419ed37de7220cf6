"""The byte budget: exact for weights and pages, kept by what is loaded, and the reason where nothing fits."""

from pathlib import Path

import pytest

from deepinfer_core.budget import system
from deepinfer_core.budget.kv import StepMemory, fit_kv
from deepinfer_core.cli.main import main
from deepinfer_core.config import CacheConfig, Config, SchedulerConfig
from deepinfer_core.errors import CapacityError
from deepinfer_core.llm import LLM

STEP = StepMemory(activations=1000, logits=400, kernels=50, attention=0, attention_per_token=3)


def _config(**cache: int) -> Config:
    return Config(cache=CacheConfig(page_size=16, **cache), scheduler=SchedulerConfig(max_requests=4))


@pytest.fixture(scope="module")
def w4_model(tiny_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "w4"
    flags = ["--recipe", "w4", "--group-size", "32", "--perplexity", "off", "--method", "rtn"]
    assert main(["quantize", str(tiny_chat_model), str(path), *flags]) == 0
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantized", [False, True])
def test_weights_and_pages_are_predicted_to_the_byte(
    tiny_chat_model: Path, w4_model: Path, dtype: str, quantized: bool
) -> None:
    running = LLM(w4_model if quantized else tiny_chat_model, dtype=dtype, device="cpu").running
    assert running.budget.weight_bytes == running.decoder.nbytes
    assert running.budget.page_bytes == running.cache.page_bytes
    assert running.budget.kv is not None
    assert running.budget.kv.pages == running.cache.total_pages
    assert running.budget.kv.max_model_len == running.engine.limits.max_model_len


def test_pages_and_the_largest_step_share_the_room() -> None:
    fit = fit_kv(_config(), 1000, 160, 8000, STEP)
    assert fit.shrunk
    assert fit.pages * 160 + STEP.total(fit.max_model_len) <= 8000
    one_page_more = fit.max_model_len + 16
    assert (one_page_more // 16) * 160 + STEP.total(one_page_more) > 8000


def test_no_more_pages_than_all_requests_can_use() -> None:
    fit = fit_kv(_config(), 64, 160, 10**9, STEP)
    assert (fit.pages, fit.max_model_len, fit.shrunk) == (4 * 4, 64, False)


def test_a_length_that_was_asked_for_is_never_shrunk() -> None:
    assert fit_kv(_config(max_model_len=160), 1000, 160, 3200, STEP).max_model_len == 160
    with pytest.raises(CapacityError, match="a context of 640 tokens needs"):
        fit_kv(_config(max_model_len=640), 1000, 160, 3200, STEP)


def test_lanes_that_overlap_pay_for_layers_and_sampling_together() -> None:
    both = StepMemory(activations=1000, logits=400, kernels=50, attention=0, attention_per_token=3, overlapped=True)
    assert STEP.total(10) == 1000 + 30 + 50
    assert both.total(10) == 1000 + 30 + 400 + 50


def test_reserve_on_a_cpu_leaves_that_much_of_the_machines_memory(
    tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_core.assemble.available_memory", lambda: 600 << 20)

    def running(reserve: str):
        return LLM(
            tiny_chat_model, device="cpu", cache={"reserve": reserve}, scheduler={"max_batched_tokens": 64}
        ).running

    plenty = running("100MiB")
    assert plenty.engine.limits.max_model_len == 256
    budget = plenty.budget
    tight = running(f"{(600 << 20) - budget.weight_bytes - budget.step.total(256) - 5 * budget.page_bytes}B")
    assert tight.cache.total_pages < 256 // 16
    with pytest.raises(CapacityError, match="the weights take"):
        running("600MiB")


def test_the_machine_says_how_much_memory_is_free() -> None:
    free = system.available_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
