"""`deepinfer bench jitter`: a long prompt comes into running streams; how long do they wait, and how long does it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

from deepinfer_core.bench.plot import Panel, Series, gaps_over_time
from deepinfer_core.bench.results import median_run, summary
from deepinfer_core.bench.stage import Bench, Stage
from deepinfer_core.bench.workload import Answers, greedy, passage, repeated
from deepinfer_core.engine.metrics import percentile
from deepinfer_core.engine.outputs import RequestHandle
from deepinfer_core.errors import ConfigError

COUNTED = ("prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps", "prefill_steps_total")
LONG_NEW_TOKENS = 8
MS = 1e3


@frozen(kw_only=True)
class JitterSpec:
    """What to measure.

    Attributes:
        chunk_sizes: Prompt tokens of a chunk; policies that choose their own chunks get it as the config's value.
        long_repeat: Times that a paragraph is repeated to make the long prompt.
        streams: Requests that run when it comes.
        prompt_tokens: Length of their prompts.
        new_tokens: Tokens that each of them generates.
        insert_after: Tokens that each has generated when the long prompt comes.
        iterations: Runs of each case, after one that is not counted.
    """

    chunk_sizes: tuple[int, ...] = (64, 256, 512)
    long_repeat: int = 32
    streams: int = 4
    prompt_tokens: int = 32
    new_tokens: int = 96
    insert_after: int = 16
    iterations: int = 3


def run(stage: Stage, spec: JitterSpec, report: Callable[[str], object] = print) -> dict[str, Any]:
    """Measure and return the result file's content: ``{meta, rows}``, a row for each chunk size and policy.

    Policies take turns run by run, so that what else the machine does falls on all of them alike.

    Raises:
        BenchError: A request failed or answered wrong.
        ConfigError: The config's limits do not allow it.
        CapacityError: Prompts and answers do not fit.
    """
    if not 2 <= spec.insert_after < spec.new_tokens:
        raise ConfigError(
            f"the long prompt comes after {spec.insert_after} of {spec.new_tokens} tokens; there must be two of them "
            "before it, and one behind it"
        )
    long_tokens = len(repeated(stage.llm.tokenizer, "0", spec.long_repeat))
    meta = stage.meta(
        "jitter",
        {
            "streams": spec.streams,
            "insert_after": spec.insert_after,
            "long_repeat": spec.long_repeat,
            "long_prompt_tokens": long_tokens,
            "iterations": spec.iterations,
        },
    )
    answers = Answers(stage.llm)
    rows = []
    for chunk in spec.chunk_sizes:
        cases = [Case(stage, spec, answers, policy, chunk) for policy in stage.policies]
        for number in range(-1, spec.iterations):
            for case in cases:
                case.measure(number)
        for case in cases:
            rows.append(case.row())
            report(line(rows[-1]))
    return {"meta": meta, "rows": rows}


class Case:
    """One policy with one chunk size."""

    def __init__(self, stage: Stage, spec: JitterSpec, answers: Answers, policy: str, chunk: int) -> None:
        self._stage = stage
        self._spec = spec
        self._answers = answers
        self._bench: Bench = stage.bench(policy, chunk_tokens=chunk, requests=spec.streams + 1)
        self._what = f"policy {self._bench.policy}, chunks of {chunk}"
        self._runs: list[dict[str, float]] = []
        self._traces: list[dict[str, Any]] = []
        self._differing = 0

    def measure(self, number: int) -> None:
        """Do one run; number -1 warms up and is not kept."""
        spec, bench, tokenizer = self._spec, self._bench, self._stage.llm.tokenizer
        prompts = [passage(tokenizer, f"{number + 1}.{i}", i, spec.prompt_tokens) for i in range(spec.streams)]
        self._stage.begin()
        before = bench.counts()
        long, streams = insert(bench, spec, repeated(tokenizer, str(number + 1), spec.long_repeat), prompts)
        after = bench.counts()
        self._differing += self._answers.check(long, LONG_NEW_TOKENS, self._what)
        self._differing += sum(self._answers.check(stream, spec.new_tokens, self._what) for stream in streams)
        self._stage.check(bench, self._what)
        if number >= 0:
            self._runs.append({**figures(long, streams), **{name: after[name] - before[name] for name in COUNTED}})
            self._traces.append(trace(long, streams))

    def row(self) -> dict[str, Any]:
        """Return the case's row: medians, runs and spread, and the token times of the run in the middle."""
        bench, spec = self._bench, self._spec
        return {
            **self._stage.describe(bench),
            "concurrency": spec.streams,
            "prompt_tokens": spec.prompt_tokens,
            "new_tokens": spec.new_tokens,
            **summary(self._runs),
            "differing_texts": self._differing,
            "path": self._stage.path(bench.counter),
            **self._traces[median_run(self._runs, "itl_ms_max")],
        }


def insert(
    bench: Bench, spec: JitterSpec, long_prompt: list[int], prompts: Sequence[list[int]]
) -> tuple[RequestHandle, list[RequestHandle]]:
    """Start streams, let the long prompt come when each has generated some tokens, and run all to their ends."""
    engine = bench.engine
    engine.check(long_prompt, greedy(LONG_NEW_TOKENS))  # before any time is spent
    streams = [engine.submit(prompt, greedy(spec.new_tokens)) for prompt in prompts]
    engine.drive(lambda: all(h.done or len(h.metrics[0].token_times) >= spec.insert_after for h in streams))
    long = engine.submit(long_prompt, greedy(LONG_NEW_TOKENS))
    engine.drive(lambda: long.done and all(handle.done for handle in streams))
    return long, streams


def figures(long: RequestHandle, streams: Sequence[RequestHandle]) -> dict[str, float]:
    """Return the figures of one run in ms; gaps are those of the streams that end after the long prompt came."""
    came = long.metrics[0].submitted
    first = long.metrics[0].token_times[0]
    calm: list[float] = []
    after: list[float] = []
    for stream in streams:
        times = stream.metrics[0].token_times
        for begin, end in pairwise(times):
            (after if end > came else calm).append(MS * (end - begin))
    last = max(stream.metrics[0].token_times[-1] for stream in streams)
    tokens = sum(len(stream.metrics[0].token_times) for stream in streams)
    return {
        "tok_s": tokens / (last - min(stream.metrics[0].submitted for stream in streams)),
        "calm_itl_ms_p50": percentile(calm, 50),
        "itl_ms_p50": percentile(after, 50),
        "itl_ms_p99": percentile(after, 99),
        "itl_ms_max": max(after),
        "jitter_ms": percentile(after, 95) - percentile(after, 50),
        "long_ttft_ms": MS * (first - came),
        "streams_that_ended_first": sum(stream.metrics[0].token_times[-1] < first for stream in streams),
    }


def trace(long: RequestHandle, streams: Sequence[RequestHandle]) -> dict[str, Any]:
    """Return when each token came, in ms from when the long prompt came."""
    came = long.metrics[0].submitted
    return {
        "long_token_times_ms": [round(MS * (t - came), 2) for t in long.metrics[0].token_times],
        "token_times_ms": [[round(MS * (t - came), 2) for t in s.metrics[0].token_times] for s in streams],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    early = row["streams_that_ended_first"]
    return (
        f"{row['policy']:<12} chunk {row['prefill_chunk_tokens']:<5} ITL max {row['itl_ms_max']:8.1f} "
        f"(+-{row['spread']['itl_ms_max'] / 2:.1%}), p50 {row['itl_ms_p50']:7.2f}, p95-p50 {row['jitter_ms']:8.2f}, "
        f"calm {row['calm_itl_ms_p50']:7.2f} ms  long prompt's TTFT {row['long_ttft_ms']:8.1f} ms  "
        f"{row['tok_s']:7.1f} tok/s{f'  ({early} streams ended before it)' if early else ''}"
    )


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return a panel for each policy with the streams' gaps at each chunk size around the long prompt's coming."""
    return [
        Panel(
            title=policy,
            series=[
                Series(
                    f"chunk {row['prefill_chunk_tokens']}",
                    gaps_over_time(row["token_times_ms"]),
                    row["long_token_times_ms"][0] / MS,
                )
                for row in rows
                if row["policy"] == policy
            ],
            mark=(0.0, "long prompt comes"),
        )
        for policy in dict.fromkeys(row["policy"] for row in rows)
    ]
