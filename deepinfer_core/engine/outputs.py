"""What a submitter holds: a handle that streams tokens, ends with a result or an error, and can be aborted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from attrs import field, frozen

from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.errors import DeepinferError

FinishReason = Literal["stop", "length", "abort"]


class GenerationError(DeepinferError):
    """A request was ended by what happened while it ran; other requests are not concerned."""

    exit_code = 8


@frozen(kw_only=True)
class TokenScore:
    """How likely a token was: its log probability and the most likely alternatives with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(kw_only=True)
class TokenOutput:
    """One token of one choice, as it is streamed.

    Attributes:
        index: Which of the request's ``n`` choices.
        token: The token; None when only text was still held back.
        text: Text that became certain with it; joined pieces are the choice's text.
        score: Its log probability, when asked for.
        finish_reason: Set on the last output of a choice.
    """

    index: int
    token: int | None
    text: str = ""
    score: TokenScore | None = None
    finish_reason: FinishReason | None = None


@frozen(kw_only=True)
class ChoiceResult:
    """One finished choice.

    Attributes:
        index: Which of the ``n`` choices.
        token_ids: What was generated, an end token included.
        text: Its text, without end token and stop string.
        finish_reason: Why it ended.
        stop_reason: The stop string or the end token that ended it.
        scores: Log probabilities of its tokens, when asked for.
        metrics: Its times.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    scores: tuple[TokenScore, ...]
    metrics: RequestMetrics = field(eq=False)


@frozen(kw_only=True)
class RequestResult:
    """A finished request.

    Attributes:
        id: Its id.
        prompt_ids: Its prompt.
        choices: Its ``n`` choices in order of index.
        prompt_scores: One entry a prompt token, None for the first; empty when not asked for.
    """

    id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[ChoiceResult, ...]
    prompt_scores: tuple[TokenScore | None, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason


class RequestHandle:
    """A submitted request. Iterate over it for tokens as they come, or wait for `result`; any thread may do either.

    Args:
        request_id: The request's id.
        prompt_ids: Its prompt.
        metrics: Times of each of its choices.
        abort: Called by `abort`.
        sink: Gets each output on the scheduler thread, instead of the queue that iteration reads; it must be quick.
        on_end: Called once on the scheduler thread, when the request has ended, well or by an error; it must be quick.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        metrics: Sequence[RequestMetrics],
        abort: Callable[[str], None],
        sink: Callable[[TokenOutput], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.error: BaseException | None = None
        self.prompt_scores: list[TokenScore | None] = []
        self.metrics = tuple(metrics)
        self._choices: list[ChoiceResult | None] = [None] * len(self.metrics)
        self._open = len(self.metrics)
        self._outputs: queue.SimpleQueue[TokenOutput | None] = queue.SimpleQueue()
        self.emit = sink or self._outputs.put  # streams one output; for the scheduler thread
        self._abort = abort
        self._on_end = on_end
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """True when every choice has ended."""
        return self._done.is_set()

    def ready(self) -> bool:
        """Return True when the next output, or the end, can be had without waiting."""
        return not self._outputs.empty()

    def abort(self) -> None:
        """Ask the engine to end the request; what it has generated so far stays in its result."""
        self._abort(self.id)

    def __iter__(self) -> Iterator[TokenOutput]:
        """Yield outputs until the request ends; raises what ended it when that was an error."""
        while (output := self._outputs.get()) is not None:
            yield output
        self._outputs.put(None)  # a second reader ends as well
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end and return everything.

        Raises:
            TimeoutError: It took longer than ``timeout`` seconds.
            DeepinferError: The request failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.id!r} has not ended within {timeout} s")
        if self.error is not None:
            raise self.error
        choices = tuple([choice for choice in self._choices if choice is not None])
        return RequestResult(
            id=self.id, prompt_ids=self.prompt_ids, choices=choices, prompt_scores=tuple(self.prompt_scores)
        )

    # What follows is for the scheduler thread.

    def close(self, choice: ChoiceResult) -> bool:
        """End one choice; returns True when it was the last one. A request that has failed stays as it is."""
        if self.done:
            return True
        assert self._choices[choice.index] is None, f"choice {choice.index} of {self.id!r} ended twice"
        self._choices[choice.index] = choice
        self._open -= 1
        if not self._open:
            self._finish()
        return not self._open

    def fail(self, error: BaseException) -> None:
        """End the request with an error; choices that are still open end with it."""
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self._outputs.put(None)
        self._done.set()
        if self._on_end is not None:
            self._on_end()
