"""Tool calls in answers of every form, however the answer was cut into pieces."""

import json
from itertools import pairwise

import pytest

from deepinfer_core.server.tools import ToolReader, form_of

CALL = '{"name": "f", "arguments": {"x": "ä }"}}'


def read(form, text, names=("f", "g"), cuts=()):
    reader = ToolReader(form, names)
    shown, calls = "", []
    for start, end in pairwise([0, *cuts, len(text)]):
        piece, found = reader.push(text[start:end])
        shown, calls = shown + piece, calls + found
    piece, found = reader.finish()
    return shown + piece, [(call.name, json.loads(call.arguments)) for call in calls + found]


@pytest.mark.parametrize(
    ("form", "text", "shown", "names"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", ["f"]),
        ("hermes", f"well,\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>", "well,\n", ["f", "f"]),
        ("hermes", f"<tool_call>\n{CALL}", "", ["f"]),  # cut off behind the call: an end token came first
        ("hermes", "a <tool_ is no call", "a <tool_ is no call", []),
        ("hermes", "<tool_call>{broken</tool_call> so", "<tool_call>{broken</tool_call> so", []),
        ("hermes", '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("llama3", '{"name": "f", "parameters": {"x": "ä }"}}', "", ["f"]),
        ("llama3", '<|python_tag|>{"name": "g", "parameters": {"x": "ä }"}}; ' + CALL, "", ["g", "f"]),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", "say {this}", "say {this}", []),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", ["f", "f"]),
        ("mistral", f" [{CALL}]", "", ["f"]),
        ("mistral", "[1, 2]", "[1, 2]", []),
        ("mistral", "plain", "plain", []),
    ],
)
def test_calls_are_found_and_text_is_kept(form, text, shown, names):
    whole = read(form, text)
    assert whole == (shown, [(name, {"x": "ä }"}) for name in names])
    for cut in range(1, len(text)):
        assert read(form, text, cuts=(cut,)) == whole, text[:cut]
    assert read(form, text, cuts=range(1, len(text))) == whole


def test_text_before_a_call_is_not_held_back():
    reader = ToolReader("hermes", ["f"])
    assert reader.push("Let me look")[0] == "Let me look"
    assert reader.push(" <")[0] == " "
    assert reader.push("b>")[0] == "<b>"


def test_arguments_that_are_text_are_passed_on():
    _, calls = read("mistral", '[{"name": "f", "arguments": "{\\"a\\": 1}"}]')
    assert calls == [("f", {"a": 1})]


def test_the_form_follows_from_the_template():
    assert form_of("... <tool_call>{...} ...") == "hermes"
    assert form_of("{% if tools %}[AVAILABLE_TOOLS] ... [TOOL_CALLS]") == "mistral"
    assert form_of("{% if tools %}Environment: ipython") == "llama3"
    assert form_of("{{ messages }}") is None
