"""From messages to the model's prompt: parts joined, roles that a template does not know put where it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_core.errors import RequestError
from deepinfer_core.server.errors import bad_request
from deepinfer_core.server.service import ServedModel, encode
from deepinfer_core.server.wire import ChatMessage, Part, Tool
from deepinfer_core.tokenizer import Tokenizer

RESERVED = frozenset(
    ("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
     "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors",
     "tokenize", "tokenizer_kwargs", "tools", "truncation")
)  # fmt: skip
"""What ``chat_template_kwargs`` may not set: words of the call that renders the template."""


def chat_prompt(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation in the model's own template, which runs in a sandbox.

    Raises:
        ApiError: 400, with the template's own words where it refused.
    """
    taken = {name for name in variables or {} if name in RESERVED or not name.isidentifier()}
    if taken:
        text = f"chat_template_kwargs may not hold {', '.join(sorted(ascii(name)[:40] for name in taken))}"
        raise bad_request(text, "chat_template_kwargs")
    plain = [_plain(i, message) for i, message in enumerate(messages)]
    more = dict(variables or {})
    if tools:
        more["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    return encode(model, _rendered(model.tokenizer, plain, more), special=False)


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        return tokenizer.chat(messages, **variables)
    except RequestError as error:
        merged = _without_system(messages)
        if merged is not None and tokenizer.has_chat_template:
            try:
                return tokenizer.chat(merged, **variables)
            except RequestError:
                pass  # the refusal was about something else: the first one says what
        raise bad_request(str(error), "messages") from error


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with the system's text before the first user's; None where there is none to move."""
    if messages[0]["role"] != "system" or len(messages) < 2 or messages[1]["role"] != "user":
        return None
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def _plain(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it: ``developer`` is ``system``, parts are one text."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _text(index, message)}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return found


def _text(index: int, message: ChatMessage) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            text = f"messages[{index}].content is null: only an assistant's message may be without"
            raise bad_request(text, f"messages.{index}.content")
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part(index, number, part) for number, part in enumerate(content))


def _part(index: int, number: int, part: Part) -> str:
    where = f"messages.{index}.content.{number}"
    text = part.text if part.type in ("text", "input_text", "output_text") else part.refusal
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise bad_request(f"a part of type {ascii(part.type)[:40]} cannot be read: this model takes text alone", where)
    if text is None:
        raise bad_request(f"a part of type {part.type} needs its text", where)
    return text


def _arguments(given: str | Mapping[str, Any] | None) -> Any:
    """Return arguments as the object that templates write down; text that is none stays text."""
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
