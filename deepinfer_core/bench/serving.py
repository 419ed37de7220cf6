"""`deepinfer bench serving`: so many clients that each send one request after another, under each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from deepinfer_core.bench.plot import Panel, Series, gaps_over_time
from deepinfer_core.bench.results import median_run, summary
from deepinfer_core.bench.stage import Bench, Stage
from deepinfer_core.bench.workload import Answers, greedy, passage
from deepinfer_core.engine.metrics import percentile
from deepinfer_core.engine.outputs import RequestHandle

COUNTED = ("prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps", "prefill_steps_total",
           "cached_tokens_total", "preemptions_total")  # fmt: skip
MS = 1e3


@frozen(kw_only=True)
class ServingSpec:
    """What to measure.

    Attributes:
        concurrency: Numbers of clients; each sends its next request when the last one was answered.
        prompt_tokens: Length of every prompt.
        new_tokens: Tokens of every answer.
        requests_per_client: Requests that a client sends in one run.
        iterations: Runs of each case, after one that is not counted.
    """

    concurrency: tuple[int, ...] = (1, 2, 4)
    prompt_tokens: int = 128
    new_tokens: int = 64
    requests_per_client: int = 2
    iterations: int = 3


def run(stage: Stage, spec: ServingSpec, report: Callable[[str], object] = print) -> dict[str, Any]:
    """Measure and return the result file's content: ``{meta, rows}``, a row for each concurrency and policy.

    Policies take turns run by run, so that what else the machine does falls on all of them alike.

    Raises:
        BenchError: A request failed or answered wrong.
        ConfigError: The config's limits do not allow it.
        CapacityError: Prompt and answer do not fit.
    """
    settings = {"requests_per_client": spec.requests_per_client, "iterations": spec.iterations}
    meta = stage.meta("serving", settings)
    answers = Answers(stage.llm)
    rows = []
    for clients in spec.concurrency:
        cases = [Case(stage, spec, answers, policy, clients) for policy in stage.policies]
        for number in range(-1, spec.iterations):
            for case in cases:
                case.measure(number)
        for case in cases:
            rows.append(case.row())
            report(line(rows[-1]))
    return {"meta": meta, "rows": rows}


class Case:
    """One policy at one concurrency."""

    def __init__(self, stage: Stage, spec: ServingSpec, answers: Answers, policy: str, clients: int) -> None:
        self._stage = stage
        self._spec = spec
        self._answers = answers
        self._clients = clients
        self._bench: Bench = stage.bench(policy, requests=clients)
        self._what = f"policy {self._bench.policy}, {clients} clients"
        self._runs: list[dict[str, float]] = []
        self._traces: list[list[list[float]]] = []
        self._differing = 0

    def measure(self, number: int) -> None:
        """Do one run; number -1 warms up and is not kept."""
        spec, bench = self._spec, self._bench
        prompts = [
            passage(self._stage.llm.tokenizer, f"{number + 1}.{i}", i, spec.prompt_tokens)
            for i in range(self._clients * spec.requests_per_client)
        ]
        self._stage.begin()
        before = bench.counts()
        handles = send(bench, prompts, self._clients, spec.new_tokens)
        after = bench.counts()
        self._differing += sum(self._answers.check(handle, spec.new_tokens, self._what) for handle in handles)
        self._stage.check(bench, self._what)
        if number >= 0:
            self._runs.append({**figures(handles), **{name: after[name] - before[name] for name in COUNTED}})
            start = min(handle.metrics[0].submitted for handle in handles)
            self._traces.append([[round(MS * (t - start), 2) for t in h.metrics[0].token_times] for h in handles])

    def row(self) -> dict[str, Any]:
        """Return the case's row: medians, runs and spread, and the token times of the run in the middle."""
        bench, spec = self._bench, self._spec
        return {
            **self._stage.describe(bench),
            "concurrency": self._clients,
            "prompt_tokens": spec.prompt_tokens,
            "new_tokens": spec.new_tokens,
            **summary(self._runs),
            "differing_texts": self._differing,
            "path": self._stage.path(bench.counter),
            "token_times_ms": self._traces[median_run(self._runs, "tok_s")],
        }


def send(bench: Bench, prompts: Sequence[list[int]], clients: int, new_tokens: int) -> list[RequestHandle]:
    """Keep so many requests running until every prompt was answered; returns them in order of submission."""
    waiting = list(reversed(prompts))
    running: list[RequestHandle] = []
    sent: list[RequestHandle] = []
    params = greedy(new_tokens)

    def all_answered() -> bool:
        running[:] = [handle for handle in running if not handle.done]
        while waiting and len(running) < clients:
            running.append(bench.engine.submit(waiting.pop(), params))
            sent.append(running[-1])
        return not running

    bench.engine.drive(all_answered)
    return sent


def figures(handles: Sequence[RequestHandle]) -> dict[str, float]:
    """Return the figures of one run: times in ms, gaps between tokens of all requests together."""
    each = [handle.metrics[0] for handle in handles]
    gaps = [MS * gap for metrics in each for gap in metrics.itl] or [0.0]
    seconds = max(m.token_times[-1] for m in each) - min(m.submitted for m in each)
    return {
        "tok_s": sum(len(m.token_times) for m in each) / seconds,
        "ttft_ms_p50": percentile([MS * (m.ttft or 0.0) for m in each], 50),
        "ttft_ms_p95": percentile([MS * (m.ttft or 0.0) for m in each], 95),
        "tpot_ms_p50": percentile([MS * (m.tpot or 0.0) for m in each], 50),
        "itl_ms_p50": percentile(gaps, 50),
        "itl_ms_p99": percentile(gaps, 99),
        "itl_ms_max": max(gaps),
        "jitter_ms": percentile(gaps, 95) - percentile(gaps, 50),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    return (
        f"{row['policy']:<12} x{row['concurrency']:<3} {row['tok_s']:8.1f} tok/s (+-{row['spread']['tok_s'] / 2:.1%})  "
        f"TTFT {row['ttft_ms_p50']:8.1f}  TPOT {row['tpot_ms_p50']:7.2f}  ITL p99 {row['itl_ms_p99']:8.2f}  "
        f"jitter {row['jitter_ms']:7.2f} ms  overlap {row['prefill_decode_overlap_steps']} cycles, "
        f"{row['prefill_decode_stream_overlap_steps']} on streams"
    )


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return a panel for each policy with the gaps between tokens at each concurrency."""
    return [
        Panel(
            title=policy,
            series=[
                Series(f"{row['concurrency']} clients", gaps_over_time(row["token_times_ms"]))
                for row in rows
                if row["policy"] == policy
            ],
        )
        for policy in dict.fromkeys(row["policy"] for row in rows)
    ]
