"""One loaded model, and a fresh engine on it for every case that a bench compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from deepinfer_core.assemble import choose_policy
from deepinfer_core.bench.meta import collect
from deepinfer_core.bench.results import BenchError
from deepinfer_core.config import ResolvedConfig
from deepinfer_core.engine.batch import Model
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import ConfigError
from deepinfer_core.llm import LLM
from deepinfer_core.plugin_api import AttentionBatch
from deepinfer_core.registry.catalog import Catalog

ALL = "all"
"""For ``--policy``: every policy that is installed."""


class RowCounter:
    """Passes forwards on and notes how many rows each had: which kernels ran follows from it."""

    def __init__(self, model: Model) -> None:
        self.rows: Counter[int] = Counter()
        self.head_rows: Counter[int] = Counter()
        self._model = model

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[dict[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return the model's logits."""
        self.rows[len(tokens)] += 1
        self.head_rows[len(logit_rows)] += 1
        return self._model.forward(tokens, batch, kv, logit_rows)


@frozen(kw_only=True, eq=False)
class Bench:
    """An engine to measure.

    Attributes:
        engine: It.
        policy: Name of its policy; core's own where none is installed.
        options: What the config says to the policy.
        chunk_tokens: Prompt tokens of a chunk.
        counter: What its forwards were.
    """

    engine: Engine
    policy: str
    options: dict[str, Any]
    chunk_tokens: int
    counter: RowCounter

    def counts(self) -> dict[str, int]:
        """Return the engine's counters so far."""
        return dict(self.engine.metrics.counters)


class Stage:
    """Loads a model once and makes engines for the policies to compare, all on one cache.

    Args:
        resolved: The config; its ``scheduler.options`` are for the policy that it names, or for the only one measured.
        catalog: What is installed.
        policies: Names, `ALL`, or none for the config's own.

    Raises:
        DeepinferError: A name or a size cannot be; nothing is loaded before the names were checked.
    """

    def __init__(self, resolved: ResolvedConfig, catalog: Catalog, policies: Sequence[str]) -> None:
        named = [p for name in policies for p in (sorted(catalog.policies) if name == ALL else [name])]
        self.policies = tuple(dict.fromkeys(named)) or (resolved.config.scheduler.policy,)
        self._resolved = resolved
        self._catalog = catalog
        whose = resolved.config.scheduler.policy
        if resolved.config.scheduler.options and len(self.policies) > 1 and whose not in self.policies:
            raise ConfigError(
                f"{resolved.describe('scheduler.options')}: several policies are measured "
                f"({', '.join(self.policies)}); say whose options these are with scheduler.policy"
            )
        for name in self.policies:
            self._choose(name)
        self.llm = LLM(config=resolved, catalog=catalog)
        self.running = self.llm.running
        self.attach: Callable[[Engine], None] = lambda engine: None  # what every engine is shown to: a trace

    def bench(self, policy: str, *, chunk_tokens: int | None = None, requests: int) -> Bench:
        """Return a new engine under a policy.

        Args:
            policy: One of `policies`.
            chunk_tokens: Prompt tokens of a chunk; None for the config's.
            requests: How many will run together.

        Raises:
            ConfigError: The config's limits do not allow so many tokens or requests.
        """
        running, limits = self.running, self.running.engine.limits
        if requests > limits.max_requests:
            raise ConfigError(
                f"{requests} requests together, but max_requests = {limits.max_requests} would let some of them wait; "
                "raise it with --scheduler.max_requests"
            )
        chunk = chunk_tokens or limits.prefill_chunk_tokens
        if chunk > limits.max_batched_tokens:
            raise ConfigError(
                f"a chunk of {chunk} tokens is more than max_batched_tokens = {limits.max_batched_tokens}"
            )
        chosen, options = self._choose(policy)
        counter = RowCounter(running.decoder)
        engine = Engine(
            counter,
            running.cache,
            evolve(limits, prefill_chunk_tokens=chunk),
            vocab_size=running.spec.vocab_size,
            policy=chosen.planner,
            policy_name=chosen.name,
            lanes=chosen.lanes,
            tokenizer=running.tokenizer,
            end_ids=running.tokenizer.eos_ids,
            row_tile=1 if running.config.batch_invariant else None,
        )
        self.attach(engine)
        return Bench(engine=engine, policy=chosen.name, options=options, chunk_tokens=chunk, counter=counter)

    def begin(self) -> None:
        """Empty the prefix cache: what an earlier run computed must not make this one faster."""
        cache = self.running.cache
        cache.assert_no_leaks()
        if cache.prefix is not None:
            cache.prefix.clear()

    def check(self, bench: Bench, what: str) -> None:
        """Check that the policy, and not core in its place, planned what was measured.

        Raises:
            BenchError: It broke a rule.
        """
        status = bench.engine.status()
        if status["policy_faults"]:
            raise BenchError(f"{what}: the policy failed: {status['last_policy_fault']}")

    def describe(self, bench: Bench) -> dict[str, Any]:
        """Return what a row says about how its requests were planned."""
        return {
            "policy": bench.policy,
            "options": bench.options,
            "prefill_decode_overlap": bench.engine.limits.overlap,
            "prefill_chunk_tokens": bench.chunk_tokens,
            "schemes": self.schemes,
        }

    def path(self, counter: RowCounter) -> list[dict[str, Any]]:
        """Return what served each distinct layer: its layout, and the dispatch rows that the forwards' sizes hit."""
        taken = []
        for problem, selection in self.running.selections.items():
            sizes = counter.rows + counter.head_rows if problem.n == self.running.spec.vocab_size else counter.rows
            hit = [row for row in selection.table.rows if any(row.m.lo <= m <= row.m.hi for m in sizes)]
            taken.append(
                {
                    "scheme": problem.scheme,
                    "n": problem.n,
                    "k": problem.k,
                    "layout": selection.layout.spec.name,
                    "kernels": {str(row.m): row.kernel.spec.name for row in hit},
                }
            )
        return taken

    @property
    def schemes(self) -> list[str]:
        """Weight schemes of the model's layers."""
        return sorted({problem.scheme for problem in self.running.selections})

    def meta(self, bench: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the result says about machine, model and settings."""
        running, config = self.running, self.running.config
        return {
            "bench": bench,
            **collect(running.place.device),
            "model": {
                "name": str(config.model).replace("\\", "/").rstrip("/").rpartition("/")[2],
                "architecture": running.spec.architecture,
                "layers": running.spec.layers,
                "vocab_size": running.spec.vocab_size,
                "weights_mib": round(running.decoder.nbytes / 2**20, 1),
            },
            "schemes": self.schemes,
            "dtype": running.place.dtype_name,
            "kv_dtype": running.attention.problem.kv_dtype,
            "attention": running.attention.spec.spec.name,
            "max_model_len": running.engine.limits.max_model_len,
            "kv_pages": running.cache.total_pages,
            "page_size": running.cache.page_size,
            "prefix_cache": running.cache.prefix is not None,
            "batch_invariant": config.batch_invariant,
            "prefill_decode_overlap": running.engine.limits.overlap,
            **settings,
        }

    def _choose(self, name: str) -> tuple[Any, dict[str, Any]]:
        config = self._resolved.config
        mine = name == config.scheduler.policy or len(self.policies) == 1
        options = dict(config.scheduler.options) if mine else {}
        scheduler = evolve(config.scheduler, policy=name, options=options)
        chosen = choose_policy(evolve(config, scheduler=scheduler), self._catalog, self._resolved.describe)
        return chosen, options
