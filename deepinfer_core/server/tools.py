"""Tool calls in the forms that the served families write: found in an answer, and made sure of by a grammar."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from deepinfer_core.engine.grammar import Grammar, Grammars
from deepinfer_core.errors import RequestError
from deepinfer_core.server.errors import bad_request
from deepinfer_core.server.wire import Tool, ToolChoice

Form = Literal["hermes", "llama3", "mistral"]
"""``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes, Qwen); a bare ``{"name", "parameters"}`` (Llama 3); and
``[TOOL_CALLS][{"name", "arguments"}, ...]`` (Mistral)."""

HERMES, MISTRAL, PYTHON_TAG = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"


@frozen
class Call:
    """A call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str

    def wire(self, index: int | None = None) -> dict[str, Any]:
        """Return it as OpenAI writes it; with its place among the calls in a stream."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        return call if index is None else {"index": index, **call}


def form_of(template: str) -> Form | None:
    """Return the form that a chat template teaches; None when it knows no tools."""
    if HERMES in template:
        return "hermes"
    if MISTRAL in template:
        return "mistral"
    if "tools" in template and ("python_tag" in template or "ipython" in template or '"parameters"' in template):
        return "llama3"
    return None


class ToolReader:
    """Reads an answer piece by piece: text goes through, calls are kept back until they are whole.

    Args:
        form: How the model writes calls.
        names: Functions that may be called; what calls another is text.
    """

    def __init__(self, form: Form, names: Sequence[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._held = ""
        self._inside = False
        self._begun = False
        self._behind_call = False
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Take a piece; return the text that is certainly no call, and the calls that became whole."""
        self._held += text
        return self._hermes() if self._form == "hermes" else self._at_start()

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest: calls, or the text of what is none."""
        held, self._held = self._held, ""
        if not held:
            return "", []
        if self._form == "hermes":
            call = self._call(held.removeprefix(HERMES)) if self._inside else None
            return ("", self._counted([call])) if call else (held, [])
        calls = self._whole(held)
        return ("", self._counted(calls)) if calls else (held, [])

    def _hermes(self) -> tuple[str, list[Call]]:
        shown = ""
        calls: list[Call] = []
        while True:
            if not self._inside:
                if self._behind_call:  # the white space there belongs to no text
                    self._held = self._held.lstrip()
                    self._behind_call = not self._held
                at = self._held.find(HERMES)
                if at < 0:
                    keep = _begun(self._held, HERMES)
                    shown += self._held[: len(self._held) - keep]
                    self._held = self._held[len(self._held) - keep :]
                    return shown, self._counted(calls)
                shown += self._held[:at]
                self._held, self._inside = self._held[at:], True
            end = self._held.find("</tool_call>")
            if end < 0:
                return shown, self._counted(calls)
            block = self._held[: end + len("</tool_call>")]
            call = self._call(block[len(HERMES) : end])
            self._held, self._inside = self._held[len(block) :], False
            if call is None:
                shown += block
            else:
                calls.append(call)
                self._behind_call = True

    def _at_start(self) -> tuple[str, list[Call]]:
        """Pass text on once it is clear that the answer does not begin as calls do."""
        if self._inside:
            return "", []
        start = self._held.lstrip()
        if not self._begun:
            marks = (MISTRAL, "[{") if self._form == "mistral" else (PYTHON_TAG, "{")
            if any(start.startswith(mark) for mark in marks):
                self._inside = True
                return "", []
            if not start or any(mark.startswith(start) for mark in marks):
                return "", []
            self._begun = True
        shown, self._held = self._held, ""
        return shown, []

    def _whole(self, text: str) -> list[Call]:
        """Return the calls that a whole answer consists of; none when any of it is something else."""
        text = text.strip().removeprefix(MISTRAL).removeprefix(PYTHON_TAG).strip()
        decoder, found, at = json.JSONDecoder(), [], 0
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            found += value if isinstance(value, list) else [value]
            at = _behind(text, at)
        calls = [self._read(value) for value in found]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, text: str) -> Call | None:
        try:
            return self._read(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def _read(self, value: Any) -> Call | None:
        if not isinstance(value, Mapping) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return Call(value["name"], arguments)
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False))

    def _counted(self, calls: Sequence[Call | None]) -> list[Call]:
        found = [call for call in calls if call is not None]
        self.calls += len(found)
        return found


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    return next((k for k in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-k:])), 0)


def _behind(text: str, at: int) -> int:
    """Return the place of the next value: white space, commas and semicolons stand between calls."""
    match = re.compile(r"[\s;,]*").match(text, at)
    return match.end() if match else at


def forced(
    form: Form | None, tools: Sequence[Tool], choice: str | ToolChoice | None, grammars: Callable[[], Grammars]
) -> Grammar | None:
    """Return the grammar of exactly one call, for ``tool_choice`` = ``required`` or a function's name; else None.

    Raises:
        ApiError: 400: there is no such function, or its parameters cannot be enforced.
    """
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    if named is None and choice != "required":
        return None
    wanted = [tool.function for tool in tools if named in (None, tool.function.name)]
    if not wanted:
        raise bad_request("tool_choice asks for a function that tools does not hold", "tool_choice")
    key = "parameters" if form == "llama3" else "arguments"
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, key: function.parameters or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for function in wanted
    ]
    schema: dict[str, Any] = one[0] if len(one) == 1 else {"anyOf": one}
    schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1} if form == "mistral" else schema
    try:
        return (
            grammars().tagged(HERMES + "\n", schema, "\n</tool_call>") if form == "hermes" else grammars().json(schema)
        )
    except RequestError as error:
        raise bad_request(str(error), "tools") from error
