"""Intake: where other threads hand requests and aborts to the scheduler thread."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from deepinfer_core.engine.admission import Admission
from deepinfer_core.engine.detokenize import TextStream
from deepinfer_core.engine.lifecycle import Lifecycle
from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.engine.outputs import GenerationError, RequestHandle, TokenOutput
from deepinfer_core.engine.request import Request
from deepinfer_core.engine.sampler import Sampler
from deepinfer_core.errors import RequestError
from deepinfer_core.plugin_api import Slo
from deepinfer_core.sampling import SamplingParams


class Intake:
    """Checks and queues what comes from outside; the scheduler thread takes it in at the start of a cycle.

    Args:
        admission: The limits.
        sampler: Opens a state for each choice.
        tokenizer: For text and stop strings; None for none.
        clock: Seconds.
    """

    def __init__(self, admission: Admission, sampler: Sampler, tokenizer: Any, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._clock = clock
        self._numbers = itertools.count()
        self._messages: deque[Request | str] = deque()  # requests to add, ids to abort, in the order they came
        self._lock = threading.Lock()  # for the two below
        self._living: set[str] = set()
        self._closed: BaseException | None = None
        self._wake = threading.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Check a request; see `Admission.check`."""
        return self._admission.check(prompt_ids, params)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        slo: Slo,
        tags: Sequence[str],
        salt: Hashable,
        sink: Callable[[TokenOutput], None] | None,
        on_end: Callable[[], None] | None = None,
    ) -> RequestHandle:
        """Check a request and queue it; see `Engine.submit`."""
        now = self._clock()
        prompt = list(prompt_ids)
        max_tokens = self._admission.check(prompt, params)
        name = f"r{next(self._numbers)}" if request_id is None else request_id
        metrics = [RequestMetrics(now, prompt_tokens=len(prompt)) for _ in range(params.n)]
        handle = RequestHandle(name, prompt, metrics, self.abort, sink, on_end)
        state = self._sampler.open(params, prompt)
        choices = [
            Request(
                id=f"{name}/{index}" if index else name,
                handle=handle,
                index=index,
                params=params,
                tokens=list(prompt),
                prompt_len=len(prompt),
                max_tokens=max_tokens,
                sampler=state.fork(index) if index else state,
                text=TextStream(self._tokenizer, stop=params.stop, min_tokens=params.min_tokens),
                metrics=metrics[index],
                deadline=None if params.deadline_ms is None else now + params.deadline_ms / 1e3,
                slo=slo,
                tags=tuple(tags),
                salt=salt,
            )
            for index in range(params.n)
        ]
        choices[0].siblings = choices[1:]
        with self._lock:
            if self._closed is not None:
                raise GenerationError(f"the engine has stopped: {self._closed}") from self._closed
            if any(choice.id in self._living for choice in choices):
                raise RequestError(f"request id {name!r} is in use; give each living request an id of its own")
            self._living.update(choice.id for choice in choices)
            self._messages.append(choices[0])
        self._wake.set()
        return handle

    def abort(self, request_id: str) -> None:
        """Queue an abort; see `Engine.abort`."""
        self._messages.append(request_id)
        self._wake.set()

    def close(self, error: BaseException) -> None:
        """Refuse everything from now on, until `reopen`."""
        with self._lock:
            self._closed = error

    def reopen(self) -> None:
        """Take requests again."""
        with self._lock:
            self._closed = None

    def wake(self) -> None:
        """End a `wait`."""
        self._wake.set()

    # What follows is for the scheduler thread.

    def wait(self, seconds: float | None) -> None:
        """Sleep until something comes in, for at most so many seconds."""
        self._wake.wait(seconds)

    def ended(self, choice_id: str) -> None:
        """Let the id of a choice that has ended be used again."""
        self._living.discard(choice_id)

    def drain(self, life: Lifecycle) -> None:
        """Hand everything that came in to the scheduler's own state."""
        self._wake.clear()
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, str):
                life.abort(message)
            else:
                life.add(message)
