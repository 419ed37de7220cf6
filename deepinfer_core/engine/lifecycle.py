"""What can happen to a request: admitted, preempted, given a token, forked, finished, failed. Scheduler thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from deepinfer_core.engine.batch import Item, Work
from deepinfer_core.engine.metrics import EngineMetrics
from deepinfer_core.engine.outputs import ChoiceResult, FinishReason, GenerationError, TokenOutput, TokenScore
from deepinfer_core.engine.request import Queues, Request
from deepinfer_core.engine.sampler import Sampled
from deepinfer_core.errors import CapacityError
from deepinfer_core.kvcache.allocator import OutOfPagesError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import EngineView
from deepinfer_core.plugin_api.planning import seniority

log = logging.getLogger("deepinfer.engine")

OUT_OF_MEMORY_LIMIT = 3
"""How often in a row, with nothing gained between, a request is put off for lack of memory before it fails."""


class Lifecycle:
    """Moves requests between queues; the one place that takes and returns their pages.

    Pages are released only here, and never while a work that reads them is in flight: a request whose work is under
    way is marked, and let go when that work has been joined.

    Args:
        kv: The cache.
        metrics: Where everything is counted.
        end_ids: The model's end tokens.
        max_requests: Most requests that hold pages at once.
        clock: Seconds.
        on_end: Called with the id of each choice that has ended.
    """

    def __init__(
        self,
        kv: KVCache,
        metrics: EngineMetrics,
        *,
        end_ids: frozenset[int],
        max_requests: int,
        clock: Callable[[], float],
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.queues = Queues()
        self._preempted: list[str] = []
        self._kv = kv
        self._metrics = metrics
        self._end_ids = end_ids
        self._max_requests = max_requests
        self._clock = clock
        self._on_end = on_end
        self._families: dict[str, list[Request]] = {}  # by the handle's id: its choices that have not ended

    def __len__(self) -> int:
        return len(self._families)

    def add(self, request: Request) -> None:
        """Queue a new request; its siblings wait for its prompt."""
        self._metrics.requests_total += 1
        self._families[request.handle.id] = [request, *request.siblings]
        self.queues.put(request, "waiting")

    def named(self, ids: Iterable[str]) -> Iterator[Request]:
        """Yield the living requests of these ids that nothing is in flight for."""
        for request_id in ids:
            request = self.queues.find(request_id)
            if request is not None and not request.in_flight:
                yield request

    def take_preempted(self) -> tuple[str, ...]:
        """Return the ids of the requests that were preempted since the last call."""
        taken, self._preempted = tuple(self._preempted), []
        return taken

    # Before a work.

    def make_room(self, request: Request, count: int) -> Item | None:
        """Give a request the pages for its next ``count`` tokens, admitting it when it waits; None when it must wait.

        Fewer tokens are taken where the prefix cache has the rest.
        """
        try:
            seq = request.seq
            if seq is None:
                seq = request.seq = self._kv.open(request.tokens, salt=request.salt, reuse=not request.scores_prompt)
            if count > 1:
                count = min(count, request.target - seq.length)
            self._kv.extend(seq, count)
        except OutOfPagesError:
            if request.phase == "waiting":
                self._return_pages(request)
            return None
        except torch.OutOfMemoryError as error:
            self.out_of_memory(request, error)
            return None
        item = Item.of(request, count)
        request.in_flight, request.healthy, request.last_planned_at = True, False, self._clock()
        if request.phase == "waiting":
            self._admitted(request)
        return item

    def preempt(self, request: Request) -> None:
        """Take a request's pages and queue it again; what the prefix cache keeps of them need not be recomputed."""
        assert not request.in_flight, f"{request.id} must not be preempted while its work is in flight"
        self._return_pages(request)
        request.wait()
        request.sampler.release()
        request.metrics.preemptions += 1
        self._metrics.preemptions_total += 1
        self._preempted.append(request.id)
        self.queues.put(request, "waiting")

    def out_of_memory(self, request: Request, error: BaseException) -> None:
        """Leave a request whose own part of a step found no memory to a later plan; fail it when that goes on.

        It keeps its pages and its place: what ran short is memory beside the pages, which have a budget of their own.
        """
        self._metrics.out_of_memory_total += 1
        request.in_flight = False
        request.out_of_memory += 1
        if request.aborted:
            self.finish(request, "abort")
        elif request.out_of_memory > OUT_OF_MEMORY_LIMIT:
            self.fail(request, CapacityError(f"request {request.id!r} ran out of memory: {error}"))
        elif request.phase == "waiting":
            self._return_pages(request)
        elif request.computed == len(request.tokens):
            assert request.seq is not None
            self._kv.rollback(request.seq, 1)  # it found no memory to sample: the last token's logits are needed again

    # After a work.

    def store(self, work: Work) -> list[Item]:
        """Count a joined work's tokens as computed; returns the items whose requests go on."""
        going_on = []
        for item in work.items:
            request = item.request
            request.in_flight = False
            if request.aborted:
                self.finish(request, "abort")
                continue
            try:
                self._kv.commit(item.sequence, item.tokens)
            except torch.OutOfMemoryError as error:
                self.out_of_memory(request, error)
                continue
            if not item.decodes:
                self._metrics.prefill_steps_total += 1
            if not item.last:
                request.out_of_memory = 0
            going_on.append(item)
        return going_on

    def accept(self, request: Request, draws: Sequence[Sampled]) -> None:
        """Give a request its next token, and its siblings (one draw each behind the first) their first one.

        Whatever goes wrong here, in a tokenizer or a caller's sink, goes wrong for this request alone.
        """
        try:
            self._accept(request, draws)
        except Exception as error:
            self.fail_all((request,), error)

    def _accept(self, request: Request, draws: Sequence[Sampled]) -> None:
        if draws[0].token is None:
            text = f"request {request.id!r}: the model's logits after token {len(request.tokens)} are not finite"
            self.fail(request, GenerationError(text))
            return
        assert request.seq is not None
        request.healthy, request.out_of_memory = True, 0
        self._kv.remember(request.seq, request.tokens)
        siblings, request.siblings = request.siblings, []
        if not request.max_tokens:  # the prompt was all that was asked for: what was drawn behind it is not taken
            for choice in (request, *siblings):
                choice.handle.emit(TokenOutput(index=choice.index, token=None, finish_reason="length"))
                self.finish(choice, "length")
            return
        for sibling, draw in zip(siblings, draws[1:], strict=True):
            if not self._take(sibling, draw):
                self._start(sibling, request)
        if not self._take(request, draws[0]) and request.phase != "decode":
            self.queues.put(request, "decode")

    # Ends.

    def abort(self, handle_id: str) -> None:
        """End every choice of a request, now or as soon as its work in flight has been joined."""
        for request in list(self._families.get(handle_id, ())):
            if request.in_flight:
                request.aborted = True
            else:
                self.finish(request, "abort")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End one choice well and return its pages."""
        self._retire(request, reason)
        if reason == "abort" and not request.handle.done:
            rest = request.text.finish()
            request.handle.emit(TokenOutput(index=request.index, token=None, text=rest, finish_reason=reason))
        request.handle.close(
            ChoiceResult(
                index=request.index,
                token_ids=tuple(request.tokens[request.prompt_len :]),
                text=request.text.text,
                finish_reason=reason,
                stop_reason=request.text.stop_reason or request.stop_token,
                scores=tuple(request.scores),
                metrics=request.metrics,
            )
        )

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with all its choices by an error; other requests are not concerned."""
        log.warning("request %r failed: %s", request.id, error)
        for choice in list(self._families.get(request.handle.id, ())):
            if choice.in_flight:
                choice.aborted = True  # closing it later finds the handle done
            else:
                self._retire(choice, "error")
        request.handle.fail(error)

    def fail_all(self, concerned: Iterable[Item | Request], error: Exception) -> None:
        """Fail those of a work's requests that still live, by what went wrong in it."""
        for one in concerned:
            request = one.request if isinstance(one, Item) else one
            request.in_flight = False
            if request in self._families.get(request.handle.id, ()):
                kind = CapacityError if isinstance(error, torch.OutOfMemoryError) else GenerationError
                failure = kind(f"request {request.id!r} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.fail(request, failure)

    def fail_senior(self, view: EngineView) -> None:
        """Fail the request that goes before all others, for no plan can ever give it what it needs."""
        senior = min((*view.waiting, *view.prefilling, *view.decoding), key=seniority)
        pool = f"{view.total_pages} of {self._kv.page_size} tokens"
        text = f"request {senior.id!r} needs more KV pages than there are: {pool}"
        for request in self.named((senior.id,)):
            self.fail(request, CapacityError(text))

    def fail_everyone(self, error: BaseException) -> None:
        """Fail all requests, whatever state they are in; nothing may be in flight any more."""
        for family in list(self._families.values()):
            failure = GenerationError(f"the engine has stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for request in family:
                request.in_flight = request.healthy = False
            self.fail(family[0], failure)

    def abort_everyone(self) -> None:
        """Abort all requests."""
        for handle_id in list(self._families):
            self.abort(handle_id)

    def _admitted(self, request: Request) -> None:
        self.queues.put(request, "prefill")
        if request.metrics.admitted is not None:
            return
        now = self._clock()
        request.metrics.admitted = now
        request.metrics.cached_tokens = request.computed
        self._metrics.queue_seconds.add(now - request.metrics.submitted)
        self._metrics.prompt_tokens_total += request.prompt_len
        self._metrics.cached_tokens_total += request.computed

    def _take(self, request: Request, draw: Sampled) -> bool:
        """Append a token; True when the request ended with it."""
        token = draw.token
        assert token is not None
        params = request.params
        request.tokens.append(token)
        request.sampler.accept(token)
        self._metrics.token(request.metrics, self._clock())
        is_end = token in params.stop_token_ids or (token in self._end_ids and not params.ignore_eos)
        reason: FinishReason | None = None
        piece = "" if is_end else request.text.push(token)
        if is_end or request.text.stopped:
            reason, request.stop_token = "stop", token if is_end else None
        elif request.generated >= request.max_tokens:
            reason = "length"
        if reason is not None:
            piece += request.text.finish()
        score = None
        if draw.logprob is not None:
            score = TokenScore(token=token, logprob=draw.logprob, top=draw.top)
            request.scores.append(score)
        request.handle.emit(
            TokenOutput(index=request.index, token=token, text=piece, score=score, finish_reason=reason)
        )
        if reason is not None:
            self.finish(request, reason)
        return reason is not None

    def _start(self, sibling: Request, parent: Request) -> None:
        """Let a further choice go on behind its first token, on its parent's pages or, without room, from the queue."""
        assert parent.seq is not None
        sibling.wait()
        sibling.metrics.admitted = parent.metrics.admitted
        if self.queues.admitted < self._max_requests:
            try:
                sibling.seq = self._kv.fork(parent.seq)
            except (OutOfPagesError, torch.OutOfMemoryError):
                sibling.seq = None
        sibling.healthy = sibling.seq is not None
        self.queues.put(sibling, "decode" if sibling.seq else "waiting")

    def _retire(self, request: Request, reason: str) -> None:
        self._return_pages(request)
        self.queues.drop(request)
        family = self._families[request.handle.id]
        family.remove(request)
        self._on_end(request.id)
        if not family:
            del self._families[request.handle.id]
        self._metrics.ended(request.metrics, reason, self._clock())

    def _return_pages(self, request: Request) -> None:
        assert not request.in_flight, f"pages of {request.id} are read by a work in flight"
        if request.seq is not None:
            self._kv.free(request.seq, scrub=not request.healthy)
            request.seq = None
