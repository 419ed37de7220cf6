"""Tools on a real model: what must be called is called, in each family's form, and comes back as OpenAI writes it."""

import json
from typing import Any

import openai
import pytest

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "clock")
]
TEMPLATES = {
    "hermes": "{{ 'T' if tools else '' }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}",
    "mistral": "{{ 'T' if tools else '' }}[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}",
    "llama3": "{{ 'T' if tools else '' }}ipython{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.fixture(params=TEMPLATES)
def tooled(make_served: Any, request: pytest.FixtureRequest) -> Any:
    served = make_served()
    served.llm.tokenizer._hf.chat_template = TEMPLATES[request.param]
    return served


def test_a_forced_call_is_made_whole_and_streamed(tooled: Any) -> None:
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
            ask: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": choice, "seed": 4}
            answer = client.chat.completions.create(**ask).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            (call,) = answer.message.tool_calls
            assert call.function.name in (("weather", "clock") if choice == "required" else ("clock",))
            assert json.loads(call.function.arguments)["unit"] in "CF"
            deltas = [c.choices[0].delta for c in client.chat.completions.create(**ask, stream=True)]
            (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
            assert streamed.index == 0
            assert (streamed.function.name, streamed.function.arguments) == (
                call.function.name,
                call.function.arguments,
            )
            assert "".join(delta.content or "" for delta in deltas) == ""


def test_tools_that_cannot_be_are_refused(tooled: Any, served: Any) -> None:
    base = {"model": "tiny", "messages": HI}
    for wrong in (
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
    ):
        tooled.refused(CHAT, {**base, **wrong})
    assert tooled.chat(messages=HI, tools=TOOLS, max_tokens=2)["choices"]
    assert tooled.chat(messages=HI, tools=TOOLS, tool_choice="none", max_tokens=2)["choices"]
    assert served.refused(CHAT, {**base, "tools": TOOLS})["param"] == "tools"
