"""LLM over a real (tiny) checkpoint: the same tokens however they are asked for, limits first, memory returned."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from deepinfer_core.config import Config
from deepinfer_core.errors import CapacityError, ConfigError, RequestError, SelectionError
from deepinfer_core.llm import LLM
from deepinfer_core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Hello", " two  words", "a longer prompt, over more than one page of the cache", "猫"]


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> LLM:
    return LLM(tiny_chat_model, device="cpu", max_model_len=200)


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.running.cache.assert_no_leaks()


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny_chat_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_chat_model, dtype=torch.float32)
    for output in llm.generate(PROMPTS, GREEDY):
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_together_alone_and_streamed_are_the_same(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        streamed = list(llm.stream(prompt, GREEDY))
        assert alone.token_ids == output.token_ids == tuple(s.token_id for s in streamed)
        assert alone.text == output.text == "".join(s.text for s in streamed)
        assert streamed[-1].finish_reason == output.finish_reason == "length"


def test_small_chunks_and_pages_change_nothing(llm: LLM, tiny_chat_model: Path) -> None:
    small = LLM(
        tiny_chat_model,
        device="cpu",
        max_model_len=200,
        page_size=2,
        scheduler={"prefill_chunk_tokens": 5, "max_batched_tokens": 7, "max_requests": 2},
    )
    expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert [o.token_ids for o in small.generate(PROMPTS, GREEDY)] == expected


def test_params_may_differ_from_prompt_to_prompt(llm: LLM) -> None:
    short, long = llm.generate(["x", "x"], [evolve(GREEDY, max_tokens=2), evolve(GREEDY, max_tokens=6)])
    assert long.token_ids[:2] == short.token_ids
    assert len(long.token_ids) == 6
    with pytest.raises(RequestError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["x", "x"], [GREEDY])


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    by_ids = llm.generate(ids, GREEDY)[0]
    assert by_ids.prompt is None
    assert by_ids.token_ids == llm.generate("Hello", GREEDY)[0].token_ids


def test_end_token_stops_and_is_not_shown(llm: LLM) -> None:
    (end,) = llm.tokenizer.eos_ids
    first = llm.generate("Hello", GREEDY)[0].token_ids[0]
    stopped = llm.generate("Hello", evolve(GREEDY, stop_token_ids=(first,)))[0]
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ((first,), "", "stop")
    assert end not in llm.generate("Hello", evolve(GREEDY, ignore_eos=False, min_tokens=12))[0].token_ids


def test_chat_goes_through_the_models_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode("user:hi\nassistant:"))
    with pytest.raises(RequestError, match="unknown role robot"):
        llm.chat([{"role": "robot", "content": "hi"}], GREEDY)


def test_seed_repeats_a_sampled_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=16, ignore_eos=True)
    first, again = (llm.generate("Hello", params)[0].token_ids for _ in range(2))
    other = llm.generate("Hello", evolve(params, seed=12))[0].token_ids
    assert first == again
    assert first != other


def test_scores_are_log_probabilities_of_what_follows(llm: LLM, tiny_chat_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_chat_model, dtype=torch.float32)
    ids = llm.tokenizer.encode("the quick brown fox")
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(llm.score(ids), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(llm.logits(ids), logits, rtol=1e-4, atol=1e-4)


def test_times_of_an_answer_are_reported(llm: LLM) -> None:
    metrics = llm.generate("Hello", GREEDY)[0].metrics
    assert metrics.ttft is not None
    assert metrics.tpot is not None
    assert metrics.ttft > 0
    assert metrics.tpot > 0
    assert len(metrics.token_times) == 12


def test_what_is_too_long_is_refused_before_work(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="max_model_len is 200"):
        llm.generate(["fine", "x" * 250], GREEDY)
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate("", GREEDY)


@pytest.mark.parametrize("prompts", [["a", 1], ["a", None], None, 5, [1.5]])
def test_what_is_no_prompt_is_named_and_never_left_out(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids"):
        llm.generate(prompts, GREEDY)


def test_prompts_may_come_from_an_iterator(llm: LLM) -> None:
    assert [o.prompt for o in llm.generate((p for p in ["a", "b"]), GREEDY)] == ["a", "b"]


def test_params_of_another_kind_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"params = \{'max_tokens': 3\}: give SamplingParams"):
        llm.generate(["a"], {"max_tokens": 3})  # type: ignore[arg-type]


def test_unfinished_stream_returns_its_memory(llm: LLM) -> None:
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    stream.close()
    llm.running.cache.assert_no_leaks()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"policy": "no-such-policy"}, SelectionError, "no-such-policy"),
        ({"attention": {"backend": "sdpaa"}}, SelectionError, "did you mean 'sdpa'"),
        ({"linear": {"fp16": {"backend": "acme"}}}, SelectionError, "acme"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len = 100000: .*config.json allows .* up to 256 tokens"),
        ({"max_model_len": 200, "kv_memory": "20KiB"}, CapacityError, "raise \\[cache\\] memory"),
        ({"cache": {"page_sizes": 16}}, ConfigError, "page_size"),
        ({"no_such_key": 1}, ConfigError, "no_such_key"),
    ],
)
def test_config_that_cannot_be_is_refused(
    tiny_chat_model: Path, overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_chat_model, device="cpu", **overrides)


def test_config_object_is_taken_as_it_is(tiny_chat_model: Path) -> None:
    made = LLM(config=Config(model=str(tiny_chat_model), device="cpu", dtype="float32"))
    assert len(made.generate("x", GREEDY)[0].token_ids) == 12
    with pytest.raises(ConfigError, match=r"attrs\.evolve"):
        LLM(tiny_chat_model, Config(), dtype="float32")
    with pytest.raises(ConfigError, match="no model was named"):
        LLM()


def test_context_is_cut_to_what_memory_holds_when_nobody_asked_for_more(tiny_chat_model: Path) -> None:
    made = LLM(tiny_chat_model, device="cpu", kv_memory="64KiB")
    assert made.running.engine.limits.max_model_len < 256
    assert made.running.engine.limits.max_model_len % 16 == 0


def test_what_a_config_says_of_length_takes_no_memory_that_the_cache_does_not_allow(
    tiny_chat_model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "long"
    shutil.copytree(tiny_chat_model, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 2**31 - 1}))
    made = LLM(copy, device="cpu", kv_memory="64KiB")  # a rotary table of that length would be gigabytes
    assert made.running.engine.limits.max_model_len < 256


def test_many_prompts_share_steps_and_show_a_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    before = llm.running.engine.status()["works"]
    outputs = llm.generate([f"prompt {i}" for i in range(64)], GREEDY, progress=True)
    assert len(outputs) == 64
    assert llm.running.engine.status()["works"] - before < 64
    assert "64/64" in capsys.readouterr().err


def test_stop_strings_choices_and_scores_come_with_an_answer(llm: LLM) -> None:
    plain = llm.generate("Hello", GREEDY)[0]
    cut = plain.text[3:5]
    stopped = llm.generate("Hello", evolve(GREEDY, stop=(cut,), logprobs=2, prompt_logprobs=1))[0]
    assert stopped.text == plain.text[: plain.text.index(cut)]
    assert stopped.finish_reason == "stop"
    assert [s.token for s in stopped.choices[0].scores] == list(stopped.token_ids)
    assert [s and s.token for s in stopped.prompt_scores] == [None, *stopped.prompt_token_ids[1:]]
    several = llm.generate("Hello", evolve(GREEDY, n=3, temperature=1.0, seed=5))[0]
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert several.choices[0].token_ids == several.token_ids


def test_policies_are_chosen_by_name_with_their_options(tiny_chat_model: Path, llm: LLM) -> None:
    scheduler = {"policy": "slo", "options": {"tpot_p95_ms": 50}}
    chosen = LLM(tiny_chat_model, device="cpu", scheduler=scheduler, max_model_len=200)
    assert chosen.running.engine.status()["policy"] == "slo"
    assert llm.running.engine.status()["policy"] == "mixed"
    assert [o.token_ids for o in chosen.generate(PROMPTS, GREEDY)] == [
        o.token_ids for o in llm.generate(PROMPTS, GREEDY)
    ]
    with pytest.raises(ConfigError, match=r"policy 'slo' has no 'tpot_ms'; did you mean"):
        LLM(tiny_chat_model, device="cpu", scheduler={"policy": "slo", "options": {"tpot_ms": 50}})
