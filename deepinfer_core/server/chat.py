"""``POST /v1/chat/completions``: a conversation through the model's template, with tools and forms where asked."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from attrs import define, field
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from deepinfer_core.engine.outputs import ChoiceResult, TokenOutput
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.errors import bad_request
from deepinfer_core.server.generation import Event, Generation
from deepinfer_core.server.logprobs import chat_logprobs
from deepinfer_core.server.messages import chat_prompt
from deepinfer_core.server.params import constraint_of, require_free_end, sampling_params
from deepinfer_core.server.service import ServedModel, Service, check_room
from deepinfer_core.server.streaming import DONE, EventStream, event, watched
from deepinfer_core.server.tools import Call, Form, ToolReader, forced, form_of
from deepinfer_core.server.usage import Usage
from deepinfer_core.server.wire import ChatRequest, Tool


@define(eq=False)
class Asked:
    """A checked request."""

    body: ChatRequest
    model: ServedModel
    params: SamplingParams
    prompt: list[int]
    tools: list[Tool]
    form: Form | None
    id: str = field(factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response or a chunk, without usage."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }

    def reader(self) -> ToolReader | None:
        """Return what finds calls in one answer; None where none may be made."""
        return ToolReader(self.form, [tool.function.name for tool in self.tools]) if self.form and self.tools else None


async def chat_completions(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a request."""
    model = service.named(body.model)
    asked = await asyncio.to_thread(_asked, service, model, body)
    generation = service.submit([(asked.prompt, asked.params)])
    if body.stream:
        return EventStream(generation, _stream(asked, generation), service.gone)
    async with watched(request.receive, generation, service.gone):
        usage = Usage()
        while not usage.complete(generation):
            usage.count(await generation.events(), generation)
    choices = [_choice(asked, choice) for choice in generation.handles[0].result(timeout=0).choices]
    return JSONResponse({**asked.envelope("chat.completion", choices), "usage": usage.report(generation)})


def _asked(service: Service, model: ServedModel, body: ChatRequest) -> Asked:
    if body.chat_template is not None:
        raise bad_request("chat_template cannot be sent: the model's own is used", "chat_template")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")
    service.check_choices(1, body.n or 1)
    tools = [] if body.tool_choice == "none" else list(body.tools or ())
    form = form_of(model.tokenizer.template_text)
    if tools and form is None:
        text = "this model's chat template knows no tools; leave tools out, or set tool_choice = 'none'"
        raise bad_request(text, "tools")
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    grammar = forced(form, tools, body.tool_choice, service.grammars)
    if grammar is not None:
        require_free_end(body, "a forced tool call")
        if body.response_format is not None and body.response_format.type != "text":
            raise bad_request("response_format cannot be joined with a forced tool call", "response_format")
    else:
        grammar = constraint_of(body.response_format, body, service.grammars)
    prompt = chat_prompt(model, body.messages, tools, body.chat_template_kwargs)
    if not prompt:
        raise bad_request("the chat template made an empty prompt of the messages", "messages")
    # Of the two names for the limit, the newer one counts where both are given.
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise bad_request("max_tokens = 0 leaves no room for an answer: at least 1", "max_tokens")
    params = sampling_params(
        body,
        service.settings,
        n=body.n or 1,
        max_tokens=check_room(model, prompt, asked),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=grammar,
    )
    model.engine.check(prompt, params)
    return Asked(body, model, params, prompt, tools, form)


def _choice(asked: Asked, choice: ChoiceResult) -> dict[str, Any]:
    text = choice.text
    calls: list[Call] = []
    reader = asked.reader()
    if reader is not None:
        text, calls = reader.push(choice.text)
        rest, more = reader.finish()
        text, calls = text + rest, _allowed(asked, [*calls, *more], 0)
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
    if calls:
        message["tool_calls"] = [call.wire() for call in calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(asked.model.texts, choice.scores) if asked.body.logprobs else None,
        "finish_reason": _reason(choice.finish_reason, bool(calls)),
    }


def _allowed(asked: Asked, calls: list[Call], before: int) -> list[Call]:
    """Return the calls that may be made: one in all where ``parallel_tool_calls`` is false."""
    return calls[: max(0, 1 - before)] if asked.body.parallel_tool_calls is False else calls


def _reason(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason


class _Delta:
    """One choice as it streams: its first chunk has the role, calls come whole."""

    def __init__(self, asked: Asked, index: int) -> None:
        self._asked = asked
        self._index = index
        self._reader = asked.reader()
        self._begun = False
        self._calls = 0

    def chunks(self, output: TokenOutput) -> list[dict[str, Any]]:
        """Return the choices to send for an output, each in a chunk of its own."""
        text = output.text
        calls: list[Call] = []
        if self._reader is not None:
            text, calls = self._reader.push(output.text)
            if output.finish_reason is not None:
                rest, more = self._reader.finish()
                text, calls = text + rest, [*calls, *more]
            calls = _allowed(self._asked, calls, self._calls)
        logprobs = None
        if self._asked.body.logprobs and output.score is not None:
            logprobs = chat_logprobs(self._asked.model.texts, [output.score])
        found = []
        if not self._begun:
            self._begun = True
            found.append(self._choice({"role": "assistant", "content": ""}))
        if text or logprobs:
            found.append(self._choice({"content": text}, logprobs))
        for call in calls:
            found.append(self._choice({"tool_calls": [call.wire(self._calls)]}))
            self._calls += 1
        if output.finish_reason is not None:
            found.append(self._choice({}, reason=_reason(output.finish_reason, bool(self._calls))))
        return found

    def _choice(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


async def _stream(asked: Asked, generation: Generation) -> AsyncIterator[bytes]:
    options, usage = asked.body.stream_options, Usage()
    at_end = bool(options and options.include_usage)
    always = at_end and bool(options and options.continuous_usage_stats)
    deltas = [_Delta(asked, index) for index in range(asked.params.n)]

    def chunk(choices: list[dict[str, Any]], *, last: bool = False) -> bytes:
        body = asked.envelope("chat.completion.chunk", choices)
        if at_end:
            body["usage"] = usage.report(generation) if last or always else None
        return event(body)

    def pieces(news: Event) -> bytes:
        usage.count([news], generation)
        if news.output is None:
            return b""
        return b"".join([chunk([choice]) for choice in deltas[news.output.index].chunks(news.output)])

    while not usage.complete(generation):
        joined = b"".join([pieces(news) for news in await generation.events()])
        if joined:
            yield joined
    yield (chunk([], last=True) if at_end else b"") + DONE
