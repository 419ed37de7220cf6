"""From the engine's thread to the event loop: outputs cross in batches, one wake-up for all that a step produced."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepinfer_core.engine.outputs import RequestHandle, TokenOutput
from deepinfer_core.server.errors import ApiError, as_api_error


class Event(NamedTuple):
    """What happened to one prompt's request: an output, or its end (None)."""

    prompt: int
    output: TokenOutput | None


class Relay:
    """Carries events to the loop. `put` may be called by any thread, and never blocks or raises."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Generation, Event]] = deque()
        self._called = False

    def put(self, generation: Generation, event: Event) -> None:
        """Hand an event over soon."""
        self._waiting.append((generation, event))
        if not self._called:  # set before the loop looks, so that nothing put is left behind
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has closed: nobody waits any more
                self._called = False

    def _deliver(self) -> None:
        self._called = False
        while self._waiting:
            generation, event = self._waiting.popleft()
            generation.take(event)


class Generation:
    """The engine requests of one HTTP request. Everything but the sinks happens on the event loop.

    Args:
        relay: Carries its events.
        on_end: Called once, when the last of its requests has ended.

    Attributes:
        handles: One a prompt.
        failure: Why it was ended from outside; None when it was not.
    """

    def __init__(self, relay: Relay, on_end: Callable[[Generation], None]) -> None:
        self.handles: list[RequestHandle] = []
        self.failure: ApiError | None = None
        self.choices = 0
        self._relay = relay
        self._on_end = on_end
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._open = 0

    def sinks(self, prompt: int) -> tuple[Callable[[TokenOutput], None], Callable[[], None]]:
        """Return what the engine calls for outputs of a prompt, and for its end."""
        return (
            lambda output: self._relay.put(self, Event(prompt, output)),
            lambda: self._relay.put(self, Event(prompt, None)),
        )

    def started(self, handles: Sequence[RequestHandle], choices: int) -> None:
        """Note what was submitted."""
        self.handles, self.choices, self._open = list(handles), choices, len(handles)

    def take(self, event: Event) -> None:
        """Get an event from the relay."""
        self._events.append(event)
        self._news.set()
        if event.output is None:
            self._open -= 1
            if not self._open:
                self._on_end(self)

    def abort(self, failure: ApiError) -> None:
        """End it: whoever waits for events gets the failure, the engine gives the pages back."""
        if self.failure is None:
            self.failure = failure
            self._news.set()
        for handle in self.handles:
            if not handle.done:
                handle.abort()

    async def events(self) -> list[Event]:
        """Wait for news and return all there is.

        Raises:
            ApiError: It was ended from outside, or one of its requests failed.
        """
        await self._news.wait()
        self._news.clear()
        if self.failure is not None:
            raise self.failure
        events, self._events = self._events, []
        for event in events:
            error = self.handles[event.prompt].error if event.output is None else None
            if error is not None:
                self.abort(as_api_error(error))
                raise as_api_error(error)
        return events
