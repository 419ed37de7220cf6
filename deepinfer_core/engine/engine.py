"""The engine: one cycle is plan -> prepare -> launch -> join -> finish."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve

from deepinfer_core.engine.admission import Admission
from deepinfer_core.engine.batch import Item, Model, Work, build_work
from deepinfer_core.engine.draws import draw, picks, score_prompts
from deepinfer_core.engine.headroom import Headroom, halves
from deepinfer_core.engine.intake import Intake
from deepinfer_core.engine.lanes import Lanes
from deepinfer_core.engine.lifecycle import Lifecycle
from deepinfer_core.engine.metrics import EngineMetrics
from deepinfer_core.engine.outputs import GenerationError, RequestHandle, TokenOutput
from deepinfer_core.engine.planner import DECODE_FIRST, Planner
from deepinfer_core.engine.sampler import Sampler
from deepinfer_core.engine.status import describe
from deepinfer_core.engine.trace import Observer, TraceFile
from deepinfer_core.engine.view import build_view
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import LaneSpec, Limits, Plan, PlannedWork, SchedulingPolicy, Slo
from deepinfer_core.sampling import SamplingParams

log = logging.getLogger("deepinfer.engine")

ONE_LANE = (LaneSpec(name="main"),)
POLL_S = 0.001
"""Pause between looks at a request that the engine's own thread computes."""


class Engine:
    """Runs requests on a model: continuous batches over one paged cache, planned by a policy.

    `submit`, `abort` and `status` may be called from any thread. Everything else happens on the thread that calls
    `step`, which is one of the engine's own between `start` and `stop`.

    Args:
        model: Its forward.
        kv: Its cache.
        limits: What one plan may hold; ``overlap`` is the ``prefill_decode_overlap`` flag.
        vocab_size: Tokens of the model.
        policy: The planner; None for core's own decode-first.
        policy_name: Its name, for reports.
        lanes: Its lanes.
        tokenizer: Has ``decode(ids)``; None leaves every text empty, and then no stop string is ever found.
        end_ids: Tokens that end a generation.
        row_tile: Rows of every forward under ``batch_invariant`` (see `build_work`); None for whole batches.
        clock: Seconds.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        limits: Limits,
        *,
        vocab_size: int,
        policy: SchedulingPolicy | None = None,
        policy_name: str = DECODE_FIRST,
        lanes: Sequence[LaneSpec] = ONE_LANE,
        tokenizer: Any = None,
        end_ids: Sequence[int] | frozenset[int] = (),
        row_tile: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        ends = frozenset(end_ids)
        sampler = Sampler(ends)
        admission = Admission(
            vocab_size=vocab_size,
            max_model_len=limits.max_model_len,
            page_size=kv.page_size,
            total_pages=kv.total_pages,
        )
        self.kv = kv
        self.metrics = EngineMetrics()
        self.limits = limits
        self.observer: Observer | None = None  # told of every plan, work and cycle
        self._model = model
        self._row_tile = row_tile
        self._clock = clock
        self._lanes = Lanes(lanes, kv.device, overlap=limits.overlap)
        self._view_limits = evolve(limits, overlap=self._lanes.overlap)
        self._headroom = Headroom(limits.max_batched_tokens)
        self._planner = Planner(policy, policy_name)
        self._sampler = sampler
        self._intake = Intake(admission, sampler, tokenizer, clock)
        self._life = Lifecycle(
            kv,
            self.metrics,
            end_ids=ends,
            max_requests=limits.max_requests,
            clock=clock,
            on_end=self._intake.ended,
        )
        self._kinds: set[str] = set()  # of the works launched, or in flight at a launch, in this cycle
        self._wake_at: float | None = None
        self._cycle = threading.RLock()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # One cycle.

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one cycle. False when nothing is left to do, or when the policy wants to be asked again later.

        What ends it by an error (Ctrl-C is one) ends every request; no page is lost, and a later step starts afresh.
        """
        try:
            self._intake.drain(self._life)
            finished = 0
            plan = self._plan()
            if self.observer is not None:
                self.observer.planned(plan)
            for work in self._prepare(plan):
                self._launch(work)
                finished += self._finish(self._lanes.ended())
            self._finish(self._lanes.ended(wait=not finished))  # what has finished may be planned again at once
            self._count_cycle()
        except BaseException as error:
            self._lanes.abandon()
            self._life.fail_everyone(error)
            raise
        return bool(len(self._life)) and self._wake_at is None

    def _plan(self) -> Plan:
        """Ask the policy what to do now; where nothing can ever be done for a request, fail it."""
        self._wake_at = None
        queues = self._life.queues
        if not len(queues) or not self._lanes.idle:
            return Plan()
        limits = self._view_limits
        if self._headroom.tokens < limits.max_batched_tokens:
            limits = evolve(limits, max_batched_tokens=self._headroom.tokens)
        view = build_view(queues, self.kv, self._lanes.views(), limits, self._planner.cost, self._clock())
        plan = self._planner.plan(view)
        if not (plan.works or plan.preempt or self._lanes.in_flight):
            self._wake_at = plan.wake_at
            if plan.wake_at is None:
                self._life.fail_senior(view)
        return plan

    def _prepare(self, plan: Plan) -> Iterator[Work]:
        """Take pages and build inputs; a second work is prepared while the first one runs."""
        for request in self._life.named(plan.preempt):
            self._life.preempt(request)
        for planned in self._in_order(plan.works):
            counts = dict(planned.items)
            rooms = [self._life.make_room(r, counts[r.id]) for r in self._life.named(counts)]
            yield from self._build(planned.lane, [item for item in rooms if item is not None])

    def _launch(self, work: Work) -> None:
        """Start the forward on its lane. Requests are not touched, unless it fails: then those in it alone."""
        try:
            self._lanes.launch(work, self._forward)
        except torch.OutOfMemoryError as error:
            for smaller in self._smaller(work.lane, work.items, error):
                self._launch(smaller)
            return
        except Exception as error:
            log.exception("a %s work of %d requests failed in its forward", work.kind, len(work.items))
            self._life.fail_all(work.items, error)
            return
        self._kinds.update(other.kind for other in self._lanes.in_flight)
        if any(other.kind != work.kind for other in self._lanes.beside(work)):
            self.metrics.prefill_decode_stream_overlap_steps += 1

    def _finish(self, works: Sequence[Work]) -> int:
        """Sample, accept tokens, update cache and state; returns how many works. All of them have ended."""
        for work in works:
            feedback = work.feedback(self._life.take_preempted())
            self.metrics.worked(work.kind, work.seconds, work.lane)
            if self.observer is not None:
                self.observer.finished(work)
            going_on = self._life.store(work)
            assert work.logits is not None
            try:
                score_prompts(self._sampler, work, going_on, self._life.out_of_memory)
                wanted = picks(work, going_on)
                drawn = draw(self._sampler, work.logits, wanted, self.metrics, self._life.out_of_memory)
                for request, draws in drawn:
                    self._life.accept(request, draws)
            except Exception as error:
                log.exception("sampling for a %s work of %d requests failed", work.kind, len(work.items))
                self._life.fail_all(going_on, error)
            self._planner.observe(feedback)
            self._headroom.worked()
        return len(works)

    # What the steps above are made of.

    def _in_order(self, works: tuple[PlannedWork, ...]) -> Sequence[PlannedWork]:
        """Without overlap everything runs one after another, decodes first."""
        if self._lanes.overlap or len(works) < 2:
            return works
        decoding = self._life.queues.decoding
        return sorted(works, key=lambda work: not all(name in decoding for name, _ in work.items))

    def _build(self, lane: str, items: Sequence[Item]) -> Iterator[Work]:
        if not items:
            return
        try:
            work = build_work(lane, items, self.kv, self._row_tile)
        except torch.OutOfMemoryError as error:
            yield from self._smaller(lane, items, error)
            return
        yield work

    def _smaller(self, lane: str, items: Sequence[Item], error: torch.OutOfMemoryError) -> Iterator[Work]:
        """Split a work that found no memory, down to the one request that cannot have what it needs."""
        self._headroom.shrink(sum(item.tokens for item in items))
        self._planner.out_of_memory(lane, items)
        parts = halves(items)
        if parts:
            self.metrics.out_of_memory_total += 1
        else:
            self._life.out_of_memory(items[0].request, error)
        for part in parts:
            yield from self._build(lane, part)

    def _forward(self, work: Work) -> torch.Tensor:
        return work.run(self._model, self.kv)

    def _count_cycle(self) -> None:
        self.metrics.cycles += 1
        if "mixed" in self._kinds or len(self._kinds) == 2:
            self.metrics.prefill_decode_overlap_steps += 1
        computed = bool(self._kinds)
        self._kinds.clear()
        idle = not computed and not self._lanes.in_flight and len(self._life.queues)
        self._planner.barren = self._planner.barren + 1 if idle else 0
        if self.observer is not None:
            self.observer.cycle_ended(self._life.queues, self.kv)

    # What other threads call.

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,  # noqa: A002 - what everybody calls it
        slo: Slo | None = None,
        tags: Sequence[str] = (),
        salt: Hashable = None,
        sink: Callable[[TokenOutput], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            prompt_ids: Its prompt.
            params: How to sample and when to stop.
            id: Its name in plans and reports, unique among living requests; made up by default.
            slo: Its own objectives.
            tags: Free labels for policies.
            salt: Prompts under different salts never share cached pages.
            sink: Gets each output on the scheduler thread, instead of the handle's queue; it must be quick.
            on_end: Called once on the scheduler thread, when the request has ended, well or by an error.

        Raises:
            RequestError: Prompt or parameters do not fit the model, or the id is in use.
            CapacityError: It can never fit.
            GenerationError: The engine has stopped.
        """
        return self._intake.submit(prompt_ids, params or SamplingParams(), id, slo or Slo(), tags, salt, sink, on_end)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Return the most tokens that a request may generate, or raise what `submit` would raise for it."""
        return self._intake.check(prompt_ids, params)

    def abort(self, request_id: str) -> None:
        """End a request soon. One that has ended, or never was, is left alone."""
        self._intake.abort(request_id)

    def status(self) -> dict[str, Any]:
        """Return what runs, how, and what has been counted."""
        return describe(
            self._planner,
            self._life.queues,
            self.kv,
            self.metrics,
            overlap=self.limits.overlap,
            streams=self._lanes.streams,
            lanes=[spec.name for spec in self._lanes.specs],
            inbox=len(self._intake),
        )

    def trace_to(self, file: TraceFile) -> None:
        """Write every cycle and every work into a trace from now on; call it before the first request."""
        names = tuple(spec.name for spec in self._lanes.specs)
        self.observer = file.observer(f"engine, policy {self._planner.name}", names, shared=not self._lanes.overlap)

    def drive(self, done: Callable[[], bool]) -> None:
        """Run cycles on the caller's thread until ``done``; where the engine has a thread of its own, wait for that.

        Several threads may drive at once: they take turns.
        """
        while not done():
            if self._thread is not None:
                time.sleep(POLL_S)
            else:
                with self.exclusive():
                    if not done() and not self.step() and self._wake_at is not None:
                        time.sleep(max(0.0, self._wake_at - self._clock()))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold off every cycle, for what must have model and cache to itself."""
        with self._cycle:
            yield

    # The engine's own thread.

    def start(self) -> None:
        """Run cycles on a thread of the engine's own until `stop`."""
        assert self._thread is None, "the engine runs already"
        self._stopping = False
        self._intake.reopen()
        self._thread = threading.Thread(target=self.run_forever, name="deepinfer-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its cycle; what still runs ends as aborted, new requests are refused until `start`."""
        self._stopping = True
        self._intake.close(GenerationError("stop() was called"))
        self._intake.wake()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.abort_all()

    def run_forever(self) -> None:
        """Run cycles until `stop`, asleep while there is nothing to do."""
        try:
            while not self._stopping:
                with self.exclusive():
                    more = self.step()
                if not more:
                    self._intake.wait(None if self._wake_at is None else max(0.0, self._wake_at - self._clock()))
        except BaseException as error:
            log.exception("the engine has stopped")
            self._intake.close(error)
            self._intake.drain(self._life)  # what came in since then
            self._life.fail_everyone(error)

    def abort_all(self) -> None:
        """End every request."""
        with self.exclusive(), torch.inference_mode():
            while works := self._lanes.ended(wait=True):
                self._finish(works)
            self._intake.drain(self._life)
            self._life.abort_everyone()
