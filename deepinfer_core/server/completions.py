"""``POST /v1/completions``: prompts as text or tokens, echoed and scored where that is asked for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from attrs import define, evolve, field
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from deepinfer_core.engine.outputs import ChoiceResult, TokenScore
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.errors import bad_request
from deepinfer_core.server.generation import Event, Generation
from deepinfer_core.server.logprobs import CompletionLogprobs
from deepinfer_core.server.params import constraint_of, sampling_params
from deepinfer_core.server.service import ServedModel, Service, check_room, encode
from deepinfer_core.server.streaming import DONE, EventStream, event, watched
from deepinfer_core.server.usage import Usage
from deepinfer_core.server.wire import CompletionRequest

DEFAULT_TOKENS = 16
"""``max_tokens`` where it is not given: OpenAI's number for this route."""


@define(eq=False)
class Asked:
    """A checked request.

    Attributes:
        params: How to sample for each prompt.
        shown: Text of each prompt, for ``echo``.
        best_of: Answers to generate for each prompt; the ``n`` best are returned.
    """

    body: CompletionRequest
    model: ServedModel
    params: list[SamplingParams]
    prompts: list[list[int]]
    shown: list[str]
    n: int
    best_of: int
    id: str = field(factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(factory=lambda: int(time.time()))

    def envelope(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, has_usage: bool
    ) -> dict[str, Any]:
        """Return a response, or one chunk of a stream: the form is the same."""
        body = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }
        return {**body, "usage": usage} if has_usage else body


async def completions(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answer a request."""
    model = service.named(body.model)
    asked = await asyncio.to_thread(_asked, service, model, body)
    generation = service.submit(list(zip(asked.prompts, asked.params, strict=True)))
    if body.stream:
        return EventStream(generation, _stream(asked, generation), service.gone)
    async with watched(request.receive, generation, service.gone):
        usage = Usage()
        while not usage.complete(generation):
            usage.count(await generation.events(), generation)
    return JSONResponse(_whole(asked, generation, usage))


def _asked(service: Service, model: ServedModel, body: CompletionRequest) -> Asked:
    n = body.n or 1
    best_of = body.best_of or n
    if body.suffix:
        raise bad_request("suffix is not supported: no model here was trained to fill in text", "suffix")
    if best_of < n:
        raise bad_request(f"best_of = {best_of} must be at least n = {n}", "best_of")
    if body.stream and best_of > n:
        raise bad_request("best_of cannot be streamed: the best answers are known at the end alone", "best_of")
    given = _several(body.prompt)
    service.check_choices(len(given), best_of)
    prompts, shown = _prompts(model, given)
    asked = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    rooms = [check_room(model, prompt, asked) for prompt in prompts]
    if asked == 0 and not body.echo and body.logprobs is None:
        raise bad_request("max_tokens = 0 without echo asks for nothing: set echo = true, or max_tokens", "max_tokens")
    ranked = body.logprobs if best_of == n else body.logprobs or 0
    params = sampling_params(
        body,
        service.settings,
        n=best_of,
        max_tokens=max(rooms),
        logprobs=ranked,
        prompt_logprobs=body.logprobs if body.echo else None,
        constraint=constraint_of(body.response_format, body, service.grammars),
    )
    each = [params if room == params.max_tokens else evolve(params, max_tokens=room) for room in rooms]
    for prompt, one in zip(prompts, each, strict=True):
        model.engine.check(prompt, one)
    return Asked(body, model, each, prompts, shown, n, best_of)


def _several(given: Any) -> list[Any]:
    """Return the prompts of a request that may have one or more."""
    return given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]


def _prompts(model: ServedModel, given: list[Any]) -> tuple[list[list[int]], list[str]]:
    """Return tokens and text of each prompt."""
    prompts: list[list[int]] = []
    shown: list[str] = []
    for one in given:
        ids = encode(model, one) if isinstance(one, str) else list(one)
        if not ids:
            raise bad_request("a prompt is empty: the model needs at least one token to continue", "prompt")
        prompts.append(ids)
        wrong = next((token for token in ids if token >= model.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"token {wrong} is none of the model's {model.vocab_size}", "prompt")
        shown.append(one if isinstance(one, str) else model.tokenizer.decode(ids))
    return prompts, shown


def _whole(asked: Asked, generation: Generation, usage: Usage) -> dict[str, Any]:
    choices = []
    for place, handle in enumerate(generation.handles):
        result = handle.result(timeout=0)
        best = sorted(result.choices, key=_mean_logprob) if asked.best_of > asked.n else result.choices
        for number, choice in enumerate(best[: asked.n]):
            choices.append(_choice(asked, place, number, choice, result.prompt_scores))
    return asked.envelope(choices, usage.report(generation), has_usage=True)


def _mean_logprob(choice: ChoiceResult) -> float:
    """Sort key: the likeliest answer per token comes first."""
    return -sum(score.logprob for score in choice.scores) / max(1, len(choice.scores))


def _choice(
    asked: Asked, place: int, number: int, choice: ChoiceResult, prompt_scores: Sequence[TokenScore | None]
) -> dict[str, Any]:
    echoed = asked.shown[place] if asked.body.echo else ""
    logprobs = None
    if asked.body.logprobs is not None:
        writer = CompletionLogprobs(asked.model.texts, len(echoed))
        logprobs = writer.answer(choice.scores)
        if asked.body.echo:
            before = writer.prompt(echoed, asked.prompts[place], prompt_scores)
            logprobs = {name: before[name] + logprobs[name] for name in logprobs}
    return {
        "index": place * asked.n + number,
        "text": echoed + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


async def _stream(asked: Asked, generation: Generation) -> AsyncIterator[bytes]:
    body, usage = asked.body, Usage()
    options = body.stream_options
    at_end = bool(options and options.include_usage)
    always = at_end and bool(options and options.continuous_usage_stats)
    writers: dict[int, CompletionLogprobs] = {}

    def chunk(news: Event) -> bytes:
        output = news.output
        assert output is not None
        index = news.prompt * asked.n + output.index
        text, logprobs = output.text, None
        first = index not in writers
        echoed = asked.shown[news.prompt] if first and body.echo else ""
        if first:
            writers[index] = CompletionLogprobs(asked.model.texts, len(echoed))
        if body.logprobs is not None:
            logprobs = writers[index].answer([output.score] if output.score else [])
        if echoed:
            text = echoed + text
            if logprobs is not None:
                scores = generation.handles[news.prompt].prompt_scores
                before = writers[index].prompt(echoed, asked.prompts[news.prompt], scores)
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        return event(asked.envelope([choice], usage.report(generation) if always else None, has_usage=at_end))

    while not usage.complete(generation):
        pieces = []
        for news in await generation.events():
            usage.count([news], generation)
            output = news.output
            if output is not None and _worth_sending(output.text, output.finish_reason, body, news, asked, writers):
                pieces.append(chunk(news))
        if pieces:
            yield b"".join(pieces)
    tail = event(asked.envelope([], usage.report(generation), has_usage=True)) if at_end else b""
    yield tail + DONE


def _worth_sending(
    text: str, reason: str | None, body: CompletionRequest, news: Event, asked: Asked, writers: dict[int, Any]
) -> bool:
    """Return False for a token whose text is still held back, unless its logprobs or the echo are due."""
    assert news.output is not None
    first = news.prompt * asked.n + news.output.index not in writers
    return bool(text or reason or body.logprobs is not None or (first and body.echo))
