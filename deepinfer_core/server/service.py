"""The service: one model behind the routes, who may still come in, and what runs now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from deepinfer_core.assemble import RunningModel
from deepinfer_core.config import ServerConfig
from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.grammar import Grammars
from deepinfer_core.engine.outputs import GenerationError, RequestHandle
from deepinfer_core.errors import RequestError
from deepinfer_core.kernels.nvrtc import compilations
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.errors import ApiError, as_api_error, bad_request, not_ready, shortened
from deepinfer_core.server.generation import Generation, Relay
from deepinfer_core.server.logprobs import TokenTexts
from deepinfer_core.tokenizer import Tokenizer

log = logging.getLogger("deepinfer.server")

State = Literal["loading", "ready", "draining"]


@frozen(kw_only=True, eq=False)
class ServedModel:
    """What the routes need of a model.

    Attributes:
        name: What clients call it.
        engine: Runs it; started.
        tokenizer: Its tokenizer.
        kernels: What serves its layers, for `/metrics` and `/status`: labels of one row each.
        about: Architecture, device and the like, for `/status`.
        texts: How single tokens are shown.
        compiled: Sources compiled by the time it was ready.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    kernels: Sequence[Mapping[str, str]] = ()
    about: Mapping[str, Any] = field(factory=dict)
    texts: TokenTexts = field(init=False)
    created: int = field(factory=lambda: int(time.time()))
    compiled: int = field(factory=compilations)
    _grammars: list[Grammars] = field(factory=list, init=False)

    @texts.default
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @classmethod
    def of(cls, running: RunningModel, name: str | None = None) -> ServedModel:
        """Describe a loaded model; its name is the last part of its path by default."""
        path = str(running.config.model).replace("\\", "/").rstrip("/")
        rows = [
            {
                "scheme": problem.scheme,
                "n": str(problem.n),
                "k": str(problem.k),
                "m": str(row.m),
                "kernel": row.kernel.spec.name,
                "layout": selection.layout.spec.name,
            }
            for problem, selection in running.selections.items()
            for row in selection.table.rows
        ]
        return cls(
            name=name or path.rpartition("/")[2] or "model",
            engine=running.engine,
            tokenizer=running.tokenizer,
            vocab_size=running.spec.vocab_size,
            kernels=rows,
            about={
                "architecture": running.spec.architecture,
                "device": str(running.place.device),
                "dtype": running.place.dtype_name,
                "attention": running.attention.spec.spec.name,
                "schemes": sorted({row["scheme"] for row in rows}),
            },
        )

    @property
    def window(self) -> int:
        """Longest context that can ever run, in tokens."""
        limits, kv = self.engine.limits, self.engine.kv
        return min(limits.max_model_len, kv.total_pages * kv.page_size)

    def grammars(self) -> Grammars:
        """Return the compiler of grammars; making it takes a moment, and happens once."""
        if not self._grammars:
            self._grammars.append(Grammars(self.tokenizer, self.vocab_size))
        return self._grammars[0]


class Service:
    """Everything that the routes share. Methods are for the event loop unless they say otherwise.

    Args:
        settings: The limits.

    Attributes:
        state: ``loading`` until `attach`, ``draining`` from `drain` on.
        generations: What runs.
        http: (route, method, status) -> answers given.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.settings = settings
        self.state: State = "loading"
        self.generations: set[Generation] = set()
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.disconnects = 0
        self.started = time.time()
        self._model: ServedModel | None = None
        self._relay: Relay | None = None

    def attach(self, model: ServedModel) -> None:
        """Serve a model from now on. Any thread."""
        self._model = model
        if self.state == "loading":
            self.state = "ready"

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            ApiError: 503: it is still being loaded.
        """
        if self._model is None:
            raise not_ready("the model is still being loaded; GET /ready says when it can be used")
        return self._model

    @property
    def loaded(self) -> ServedModel | None:
        """The model, None while it is being loaded."""
        return self._model

    @property
    def live(self) -> int:
        """Answers that were asked for and have not ended."""
        return sum(generation.choices for generation in self.generations)

    def named(self, name: str | None) -> ServedModel:
        """Return the model that a client names.

        Raises:
            ApiError: 404 for any other name, which is looked up nowhere; 503 before there is one.
        """
        model = self.model
        if name is not None and name != model.name:
            shown = shortened(ascii(name), 80)
            text = f"the model {shown} does not exist here; GET /v1/models lists what does"
            raise ApiError(404, text, param="model", code="model_not_found")
        return model

    def check_choices(self, prompts: int, n: int) -> None:
        """Refuse more answers than one request may ask for. Any thread.

        Raises:
            ApiError: 400.
        """
        if prompts * n > self.settings.max_choices:
            text = f"{prompts} prompts with {n} answers each: at most {self.settings.max_choices} answers a request"
            raise bad_request(text, "n" if n > 1 else "prompt")

    def submit(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> Generation:
        """Queue prompts, each with how to sample, all or none. They were checked by `Engine.check`.

        Raises:
            ApiError: 429 when the queue is full, 503 while draining.
        """
        model, settings = self.model, self.settings
        if self.state == "draining":
            raise not_ready("the server is shutting down")
        choices = sum(params.n for _, params in requests)
        most = model.engine.limits.max_requests + settings.max_queue
        if self.live + choices > most:
            text = f"the queue is full: {self.live} of {most} answers are in work or waiting; try again later"
            raise ApiError(429, text, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        if self._relay is None:
            self._relay = Relay(asyncio.get_running_loop())
        generation = Generation(self._relay, self.generations.discard)
        handles: list[RequestHandle] = []
        try:
            for index, (prompt, params) in enumerate(requests):
                sink, on_end = generation.sinks(index)
                handles.append(model.engine.submit(prompt, params, sink=sink, on_end=on_end))
        except GenerationError as error:
            for handle in handles:
                handle.abort()
            raise not_ready("the engine has stopped; the server must be started again") from error
        generation.started(handles, choices)
        self.generations.add(generation)
        return generation

    def gone(self) -> None:
        """Count a client that went before its answer was complete."""
        self.disconnects += 1

    def grammars(self) -> Grammars:
        """Return the model's compiler of grammars. For a thread beside the loop."""
        return self.model.grammars()

    async def drain(self, grace: float) -> bool:
        """Refuse new requests, and wait for those that run; True when all ended in time, else the rest is ended."""
        self.state = "draining"
        until = time.monotonic() + grace
        while self.generations and time.monotonic() < until:
            await asyncio.sleep(0.05)
        clean = not self.generations
        if not clean:
            log.warning("%d requests are ended: they did not finish within the grace period", len(self.generations))
        self.end_all()
        return clean

    def end_all(self) -> None:
        """End everything that runs; streams get an error event."""
        failure = not_ready("the server is shutting down: this answer is not complete")
        for generation in list(self.generations):
            generation.abort(failure)


def check_room(model: ServedModel, prompt: Sequence[int], asked: int | None) -> int:
    """Return the most tokens that may be generated: what was asked for, cut to what the window leaves.

    Raises:
        ApiError: 400 when the prompt leaves no room at all. Asked for no tokens, it may fill the window.
    """
    room = model.window - len(prompt)
    if room < 0 or (room == 0 and asked != 0):
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, and the model's window is {model.window}; shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    return room if asked is None else min(asked, room)


def encode(model: ServedModel, text: str, *, special: bool = True) -> list[int]:
    """Return the tokens of a text. One that cannot fit is refused before the tokenizer reads it.

    Raises:
        ApiError: 400.
    """
    longest = model.window * MOST_CHARACTERS
    if len(text) > longest:
        raise bad_request(
            f"the prompt has {len(text)} characters, and the model's window is {model.window} tokens",
            "prompt",
            "context_length_exceeded",
        )
    try:
        return model.tokenizer.encode(text, special=special)
    except RequestError as error:
        raise as_api_error(error) from error


MOST_CHARACTERS = 128
"""Characters that one token can stand for: vocabularies have tokens of up to 128 spaces or dashes."""
