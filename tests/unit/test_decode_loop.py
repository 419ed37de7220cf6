"""The plain decode loop over a model that counts: limits, end tokens, sampling, and pages that always come back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from deepinfer_core.engine.loop import DecodeLoop, Generation, LoopLimits
from deepinfer_core.errors import CapacityError, ModelError, RequestError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.sampling import SamplingParams

VOCAB = 32
PAGE = 4
END = 31


class _OneByteATokenBackend:
    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"k": ((pages, PAGE), "float32")}

    def copy_page(self, kv: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        kv["k"][target] = kv["k"][source]


class _Counting:
    """After token t comes t + 1, with t + 2 half as likely; keeps what it was asked."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.fail_after: int | None = None
        self.nan = False

    def __call__(
        self, tokens: torch.Tensor, batch: Any, kv: Sequence[Mapping[str, torch.Tensor]], logit_rows: torch.Tensor
    ) -> torch.Tensor:
        if self.fail_after is not None and len(self.steps) >= self.fail_after:
            raise RuntimeError("the forward broke")
        self.steps.append(batch.query_lens)
        logits = torch.full((len(logit_rows), VOCAB), -30.0)
        for row, token in enumerate(tokens[logit_rows].tolist()):
            logits[row, (token + 1) % VOCAB] = 1.0
            logits[row, (token + 2) % VOCAB] = 1.0 - float(torch.tensor(2.0).log())
        return logits * (torch.nan if self.nan else 1.0)


@pytest.fixture
def forward() -> _Counting:
    return _Counting()


@pytest.fixture
def cache() -> Iterator[KVCache]:
    cache = KVCache(_OneByteATokenBackend(), layers=1, page_size=PAGE, pages=8)  # type: ignore[arg-type]
    yield cache
    cache.assert_no_leaks()


@pytest.fixture
def loop(forward: _Counting, cache: KVCache) -> DecodeLoop:
    limits = LoopLimits(
        max_model_len=30, prefill_chunk_tokens=3, max_requests=2, vocab_size=VOCAB, eos_ids=frozenset({END})
    )
    return DecodeLoop(forward, cache, limits)


def _run(loop: DecodeLoop, *requests: tuple[list[int], SamplingParams]) -> list[Generation]:
    generations = [loop.accept(prompt, params) for prompt, params in requests]
    for _ in loop.run(generations):
        pass
    return generations


def _greedy(max_tokens: int | None = None, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **values)


def test_tokens_are_those_of_the_model_and_the_last_reason_is_length(loop: DecodeLoop) -> None:
    (done,) = _run(loop, ([1, 2, 3], _greedy(4)))
    assert (done.tokens, done.finish_reason) == ([4, 5, 6, 7], "length")
    assert len(done.metrics.token_times) == 4


def test_long_prompt_is_computed_in_chunks(loop: DecodeLoop, forward: _Counting) -> None:
    _run(loop, (list(range(8)), _greedy(2)))
    assert forward.steps == [(3,), (3,), (2,), (1,)]


def test_requests_decode_together_and_later_ones_wait_for_a_place(loop: DecodeLoop, forward: _Counting) -> None:
    done = _run(loop, ([1], _greedy(3)), ([5], _greedy(3)), ([9], _greedy(2)))
    assert [g.tokens for g in done] == [[2, 3, 4], [6, 7, 8], [10, 11]]
    assert (1, 1) in forward.steps
    assert max(len(step) for step in forward.steps) == 2


def test_end_token_stops_and_is_the_last_token(loop: DecodeLoop) -> None:
    (done,) = _run(loop, ([29], _greedy(10)))
    assert (done.tokens, done.finish_reason) == ([30, END], "stop")


def test_end_token_is_passed_over_on_request(loop: DecodeLoop) -> None:
    ignoring, at_least, own = _run(
        loop,
        ([29], _greedy(4, ignore_eos=True)),
        ([29], _greedy(4, min_tokens=3)),
        ([1], _greedy(9, stop_token_ids=(4,))),
    )
    assert ignoring.tokens == [30, END, 0, 1]
    assert at_least.tokens == [30, 0, 1, 2], "before min_tokens the end token is not a choice"
    assert (own.tokens, own.finish_reason) == ([2, 3, 4], "stop")


def test_omitted_max_tokens_is_what_the_model_length_leaves(loop: DecodeLoop) -> None:
    (done,) = _run(loop, ([1] * 25, _greedy(None, ignore_eos=True)))
    assert len(done.tokens) == 5


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], _greedy(1), RequestError, "prompt is empty"),
        ([VOCAB], _greedy(1), RequestError, f"token {VOCAB}"),
        ([1] * 30, _greedy(1), CapacityError, "max_model_len is 30"),
        ([1] * 10, _greedy(21), CapacityError, "max_model_len is 30"),
        ([1], _greedy(2, n=2, logprobs=1), RequestError, "logprobs, n: this release does not serve them"),
        ([1], _greedy(2, stop="x"), RequestError, "stop: this release does not serve it"),
        ([1], _greedy(2, stop_token_ids=(VOCAB,)), RequestError, "stop_token_ids"),
        ([1] * 29, _greedy(min_tokens=2), RequestError, "min_tokens = 2: only 1"),
    ],
)
def test_impossible_request_is_refused_before_any_work(
    loop: DecodeLoop,
    forward: _Counting,
    prompt: list[int],
    params: SamplingParams,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        loop.accept(prompt, params)
    assert forward.steps == []


def test_request_larger_than_the_whole_cache_is_refused(forward: _Counting) -> None:
    cache = KVCache(_OneByteATokenBackend(), layers=1, page_size=PAGE, pages=2)  # type: ignore[arg-type]
    limits = LoopLimits(max_model_len=30, prefill_chunk_tokens=3, max_requests=2, vocab_size=VOCAB, eos_ids=frozenset())
    with pytest.raises(CapacityError, match="need 3 KV pages, the cache has 2"):
        DecodeLoop(forward, cache, limits).accept([1], _greedy(8))


def test_requests_that_do_not_fit_together_run_one_after_the_other(loop: DecodeLoop, forward: _Counting) -> None:
    done = _run(loop, ([1] * 16, _greedy(4)), ([2] * 16, _greedy(4)))
    assert [g.tokens for g in done] == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert max(len(step) for step in forward.steps) == 1


def test_same_seed_gives_the_same_tokens_alone_and_in_company(loop: DecodeLoop) -> None:
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    (alone,) = _run(loop, ([1], params))
    together = _run(loop, ([3], SamplingParams(max_tokens=12, seed=1, ignore_eos=True)), ([1], params))
    assert together[1].tokens == alone.tokens
    assert alone.tokens != list(range(2, 14)), "a draw at temperature 1 does not always take the likeliest token"


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}, {"temperature": 0.01}])
def test_each_cut_leaves_only_the_likeliest_token(loop: DecodeLoop, cut: dict[str, Any]) -> None:
    (done,) = _run(loop, ([1], SamplingParams(max_tokens=8, seed=3, **cut)))
    assert done.tokens == list(range(2, 10))


def test_frequencies_follow_the_distribution(loop: DecodeLoop) -> None:
    firsts = [_run(loop, ([1], SamplingParams(max_tokens=1, seed=s)))[0].tokens[0] for s in range(300)]
    assert set(firsts) == {2, 3}
    assert 170 < firsts.count(2) < 230, "two thirds of 300, with room for chance"


def test_pages_come_back_when_the_forward_breaks(loop: DecodeLoop, forward: _Counting, cache: KVCache) -> None:
    forward.fail_after = 3
    with pytest.raises(RuntimeError, match="broke"):
        _run(loop, ([1], _greedy(8)), ([2], _greedy(8)))
    cache.assert_no_leaks()


def test_pages_come_back_when_the_caller_stops_listening(loop: DecodeLoop, cache: KVCache) -> None:
    stream = loop.run([loop.accept([1], _greedy(8)), loop.accept([2], _greedy(8))])
    next(stream)
    stream.close()
    cache.assert_no_leaks()


def test_logits_that_are_no_numbers_are_an_error_not_a_token(loop: DecodeLoop, forward: _Counting) -> None:
    forward.nan = True
    with pytest.raises(ModelError, match="not finite"):
        _run(loop, ([1], _greedy(2)))


def test_scores_come_for_every_position_and_leave_nothing_behind(loop: DecodeLoop, cache: KVCache) -> None:
    logits = torch.cat(list(loop.score(list(range(7)))))
    assert logits.argmax(-1).tolist() == list(range(1, 8))
    cache.assert_no_leaks()
