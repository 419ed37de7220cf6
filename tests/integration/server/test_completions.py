"""`/v1/completions` and `/v1/chat/completions`: what clients may send, and that every form gives the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.errors import RequestError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def ids(served: Any, text: str) -> list[int]:
    return served.llm.tokenizer.encode(text)


def test_every_form_of_a_prompt_gives_the_answer_of_the_library(served: Any) -> None:
    from deepinfer_core.sampling import SamplingParams

    hello, pear = ids(served, "Hello"), ids(served, "a pear")
    expected = []
    for prompt in (hello, pear):
        handle = served.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=8))
        expected.append(handle.result(timeout=20).text)
    for form, answers in (
        ("Hello", expected[:1]),
        (["Hello", "a pear"], expected),
        (hello, expected[:1]),
        ([hello, pear], expected),
    ):
        choices = served.complete(prompt=form, max_tokens=8)["choices"]
        assert [(c["index"], c["text"]) for c in choices] == list(enumerate(answers))


def test_a_stream_is_the_answer_in_pieces(served: Any) -> None:
    whole = served.complete(prompt=["Hello", "a pear"], n=2, temperature=1, seed=5, max_tokens=12)
    chunks = served.events(TEXT, {"prompt": ["Hello", "a pear"], "n": 2, "temperature": 1, "seed": 5, "max_tokens": 12})
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_n_answers_have_indexes_and_their_tokens_are_summed(served: Any) -> None:
    for extra in ({"n": 3, "temperature": 1}, {"n": 2, "temperature": 0}, {"n": 2, "best_of": 4, "temperature": 1}):
        answer = served.complete(prompt="Hello", max_tokens=6, ignore_eos=True, **extra)
        assert [c["index"] for c in answer["choices"]] == list(range(extra["n"]))
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        generated = extra.get("best_of", extra["n"])
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6 * generated,
            "total_tokens": 5 + 6 * generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    chat = served.chat(messages=HI, n=3, temperature=1, max_tokens=4, ignore_eos=True)
    assert [c["index"] for c in chat["choices"]] == [0, 1, 2]
    assert served.refused(TEXT, {"model": "tiny", "prompt": "x", "best_of": 4, "stream": True})["param"] == "best_of"
    assert served.refused(TEXT, {"model": "tiny", "prompt": "x", "best_of": 1, "n": 2})["param"] == "best_of"
    for n in (0, -1, 2_000_000, 1.5, "2", True):
        assert served.refused(TEXT, {"model": "tiny", "prompt": "x", "n": n})["param"] == "n"


def test_best_of_returns_the_likeliest(served: Any) -> None:
    ask = {"prompt": "Hello", "max_tokens": 6, "temperature": 1.5, "seed": 3, "ignore_eos": True, "logprobs": 0}
    all_of_them = served.complete(**ask, n=4)["choices"]
    best = served.complete(**ask, n=1, best_of=4)["choices"]
    score = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])
    assert best[0]["text"] == max(all_of_them, key=score)["text"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_usage_is_streamed_when_asked_for_and_only_then(served: Any, path: str) -> None:
    ask: dict[str, Any] = {"prompt": "hi"} if path == TEXT else {"messages": HI}
    ask |= {"max_tokens": 4, "ignore_eos": True}
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        chunks = served.events(path, ask | ({} if options is None else {"stream_options": options}))
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    chunks = served.events(path, ask | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in served.events(path, ask | {"stream_options": options})]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert served.refused(path, {"model": "tiny", **ask, "stream_options": {}})["param"] == "stream_options"


@pytest.mark.parametrize(
    ("limit", "generated"), [(1000, 108), (10**12, 108), (108, 108), (5, 5), (None, 108), ("left out", 108)]
)
def test_max_tokens_is_cut_to_the_window(served: Any, limit: Any, generated: int) -> None:
    given = {} if limit == "left out" else {"max_tokens": limit}
    answer = served.chat(messages=[{"role": "user", "content": "x" * 4}], ignore_eos=True, **given)
    assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["finish_reason"]) == (20, "length")
    assert answer["usage"]["completion_tokens"] == generated
    if limit in (None, "left out"):
        assert served.complete(prompt="x" * 20, ignore_eos=True, **given)["usage"]["completion_tokens"] == 16
    else:
        answer = served.complete(prompt="x" * 20, ignore_eos=True, **given)
        assert answer["usage"]["completion_tokens"] == generated


def test_prompts_that_fill_the_window_are_refused(served: Any) -> None:
    for length in (128, 129, 100_000):
        error = served.refused(TEXT, {"model": "tiny", "prompt": "x" * length, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded"
    assert served.complete(prompt="x" * 127, max_tokens=50)["usage"]["completion_tokens"] == 1
    error = served.refused(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x" * 128}]})
    assert error["code"] == "context_length_exceeded"
    for wrong in (-1, "5", 1.5, True):
        for path, ask in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": HI})):
            assert served.refused(path, {"model": "tiny", **ask, "max_tokens": wrong})["param"] == "max_tokens"
    assert served.refused(CHAT, {"model": "tiny", "messages": HI, "max_tokens": 0})["param"] == "max_tokens"


def test_max_completion_tokens_goes_before_max_tokens(served: Any) -> None:
    for given, generated in (({"max_completion_tokens": 3}, 3), ({"max_completion_tokens": 3, "max_tokens": 9}, 3)):
        answer = served.chat(messages=HI, ignore_eos=True, **given)
        assert answer["usage"]["completion_tokens"] == generated


def test_echo_scores_the_prompt_like_the_library(served: Any) -> None:
    text = "Two plus two is four"
    tokens = ids(served, text)
    with served.engine.exclusive():
        expected = served.llm.score(tokens).tolist()
    for limit, generated in ((0, 0), (1, 1), (None, 16)):
        given = {} if limit is None else {"max_tokens": limit}
        answer = served.complete(prompt=text, echo=True, logprobs=1, ignore_eos=True, **given)
        (choice,) = answer["choices"]
        scores = choice["logprobs"]
        assert answer["usage"]["completion_tokens"] == generated
        assert {len(values) for values in scores.values()} == {len(tokens) + generated}
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert scores["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
        assert choice["text"].startswith(text)
        if not generated:
            assert choice["text"] == text
        for token, offset in zip(scores["tokens"][: len(tokens)], scores["text_offset"], strict=False):
            assert choice["text"][offset : offset + len(token)] == token
        for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
            assert token in top
    assert served.refused(TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 0})["param"] == "max_tokens"
    full = served.complete(prompt="x" * 128, max_tokens=0, echo=True, logprobs=0)
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 128


def test_echo_streams_the_prompt_first(served: Any) -> None:
    ask = {"prompt": "a 猫", "echo": True, "logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    (whole,) = served.complete(**ask)["choices"]
    pieces = [chunk["choices"][0] for chunk in served.events(TEXT, ask | {"temperature": 0})]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [v for piece in pieces for v in piece["logprobs"][name]] == values
    assert [t for t in whole["logprobs"]["tokens"] if t.startswith("bytes:")][:3] == [
        f"bytes:\\x{byte:02x}" for byte in "猫".encode()
    ]
    assert whole["logprobs"]["text_offset"][:6] == [0, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("size", [16, 31, 32, 33])
def test_a_cached_prompt_is_scored_and_continued_alike(served: Any, size: int) -> None:
    for ask in ({"max_tokens": 1}, {"max_tokens": 8}, {"max_tokens": 1, "echo": True, "logprobs": 1}):
        prompt = [(7 * i + size) % 250 for i in range(size)]
        first, *others = [served.complete(prompt=prompt, ignore_eos=True, **ask)["choices"] for _ in range(3)]
        assert others == [first, first]
        if "echo" in ask:
            assert len(first[0]["logprobs"]["tokens"]) == size + 1


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], [-1], [257], [10**18], [1.5], [True], [["a"]], None, 5, {"a": 1}, [[1], []], ["a", 1]],
)
def test_what_is_no_prompt_is_refused_and_hurts_nobody(served: Any, prompt: Any) -> None:
    served.refused(TEXT, {"model": "tiny", "prompt": prompt, "max_tokens": 2})
    assert served.client.get("/health").status_code == 200
    assert served.complete(prompt="x", max_tokens=1)["choices"]


def test_fields_that_cannot_be_are_named(served: Any) -> None:
    for field, value in (
        ("suffix", "x"), ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("min_p", 2),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**70), ("seed", 1.5),
        ("logprobs", 10**8), ("logprobs", -1), ("logprobs", True), ("stop", ""), ("stop", ["a"] * 33), ("stop", [1]),
        ("stop", ["x"] * 5000), ("stop_token_ids", [10**7]), ("stop_token_ids", [-1]),
        ("logit_bias", {"x y": -50}), ("logit_bias", {"-1": 5}), ("logit_bias", {"99999999": 5}),
        ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 1e30}), ("top_k", -2), ("deadline_ms", -1), ("priority", "a"),
        ("min_tokens", -1), ("stream", "yes"), ("echo", 1), ("temperature", 10**399),
        ("response_format", {"type": "x"}),
    ):  # fmt: skip
        error = served.refused(TEXT, {"model": "tiny", "prompt": "x", field: value})
        assert error["type"] == "invalid_request_error"
        assert field in (error["param"] or "") or field in error["message"], (field, error)
    assert served.complete(prompt="x", max_tokens=1, suffix="", user="me", priority=3, deadline_ms=1e4, top_k=-1)


def test_null_means_not_given(served: Any) -> None:
    null = dict.fromkeys(
        ("stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty",
         "frequency_penalty", "logit_bias", "user", "top_k", "min_p", "ignore_eos", "suffix", "echo", "logprobs",
         "best_of", "response_format", "priority", "deadline_ms"),
    )  # fmt: skip
    answer = served.post(TEXT, {"model": "tiny", "prompt": "x", **null})
    assert answer.status_code == 200
    assert served.post(CHAT, {"model": "tiny", "messages": HI, **null, "tools": None, "echo": 1}).status_code == 200


def test_content_parts_are_joined_without_anything_between(served: Any) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hi"}]
    for role in ("user", "system", "assistant"):
        joined = served.post("/tokenize", {"messages": [{"role": role, "content": "Say hi"}]}).json()
        assert served.post("/tokenize", {"messages": [{"role": role, "content": parts}]}).json() == joined
    answers = [served.chat(messages=[{"role": "user", "content": c}], max_tokens=4) for c in (parts, "Say hi")]
    assert answers[0]["choices"] == answers[1]["choices"]
    image = [{"type": "image_url", "image_url": {"url": "data:x"}}]
    assert (
        "image_url"
        in served.refused(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": image}]})["message"]
    )
    none = [*HI, {"role": "assistant", "content": None, "tool_calls": []}]
    assert served.chat(messages=none, max_tokens=1)["choices"]
    for wrong in (None, 5, [{"type": "text"}], [5], {"type": "text"}):
        served.refused(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": wrong}]})
    assert served.chat(messages=[{"role": "user", "content": []}], max_tokens=1)["choices"]


def test_messages_that_the_template_or_nobody_knows(served: Any) -> None:
    for wrong in ([], [{"role": "wizard", "content": "x"}], [{"content": "x"}], "hi", None, [None], [[]]):
        served.refused(CHAT, {"model": "tiny", "messages": wrong})
    error = served.refused(CHAT, {"model": "tiny", "messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]})
    assert "unknown role tool" in error["message"]
    system = served.post("/tokenize", {"messages": [{"role": "system", "content": "be kind"}, *HI]}).json()
    assert served.post("/tokenize", {"messages": [{"role": "developer", "content": "be kind"}, *HI]}).json() == system
    for name, value in (("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"chat_template": "x"})):
        assert served.refused(CHAT, {"model": "tiny", "messages": HI, name: value})["param"] == name


@pytest.mark.parametrize(
    ("template", "messages", "outcome"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
         "{% for m in messages %}{{ m.content + '|' }}{% endfor %}",
         [{"role": "system", "content": "be kind"}, *HI], "be kind\n\nhi|"),
        ("{{ raise_exception('roles must alternate') if messages | length == 2 else 'ok' }}", [*HI, *HI], None),
        ("{{ 1 / 0 }}", HI, None),
        ("{{ ''.__class__.__mro__ }}", HI, None),
        (None, HI, None),
    ],
)  # fmt: skip
def test_templates_that_refuse(
    make_served: Any, template: str | None, messages: list[dict[str, str]], outcome: str | None
) -> None:
    served = make_served()
    served.llm.tokenizer._hf.chat_template = template
    answer = served.post("/tokenize", {"messages": messages})
    if outcome is not None:
        assert answer.json()["tokens"] == ids(served, outcome)
        return
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "template" in message
    assert ("roles must alternate" in message) == ("alternate" in (template or ""))


def test_chat_logprobs_name_tokens_with_their_bytes(served: Any) -> None:
    (choice,) = served.chat(messages=HI, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert text.rstrip("\ufffd") == choice["message"]["content"].rstrip("\ufffd")
    chunks = served.events(CHAT, {"messages": HI, "temperature": 0, "max_tokens": 4, "ignore_eos": True,
                                  "logprobs": True, "top_logprobs": 2})  # fmt: skip
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    served.refused(CHAT, {"model": "tiny", "messages": HI, "top_logprobs": 2})


def test_a_schema_is_held_also_in_a_stream_and_by_every_answer(served: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "xl"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.chat(messages=HI, response_format=form, n=3, temperature=1.5)
    for choice in answer["choices"]:
        value = json.loads(choice["message"]["content"])
        assert isinstance(value["ok"], bool)
        assert value["size"] in ("s", "xl")
        assert choice["finish_reason"] == "stop"
    chunks = served.events(CHAT, {"messages": HI, "response_format": form})
    assert json.loads("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)).keys() == {"ok", "size"}
    text = served.complete(prompt="x", response_format={"type": "json_object"}, max_tokens=30)["choices"][0]["text"]
    assert text.startswith("{")
    assert served.chat(messages=HI, response_format={"type": "text"}, max_tokens=2)["choices"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.com/s.json"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(", "type": "string"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["y" * 70_000]}}},
    ],
)
def test_a_schema_that_cannot_be_held_is_refused(served: Any, form: dict[str, Any]) -> None:
    served.refused(CHAT, {"model": "tiny", "messages": HI, "response_format": form, "max_tokens": 4})


def test_grammars_and_forced_lengths_exclude_each_other(served: Any) -> None:
    for more in ({"min_tokens": 3}, {"ignore_eos": True}):
        ask = {"model": "tiny", "messages": HI, "response_format": {"type": "json_object"}, **more}
        assert served.refused(CHAT, ask)["param"] in more


def test_unknown_models_are_404_and_nothing_is_looked_up(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or real(self, *a, **k))
    names = ["../../etc", "/abs/path", "org/other-model", "C:\\x", "%2e%2e/x", "a\x00b", "", "x" * 100_000, "tiny "]
    for name in names:
        error = served.refused(TEXT, {"model": name, "prompt": "x"}, 404)
        assert error["code"] == "model_not_found"
    for wrong in (None, 5, ["tiny"]):
        served.refused(TEXT, {"model": wrong, "prompt": "x"})
    served.refused(TEXT, {"prompt": "x"})
    for path in ("/v1/models/x", "/v1/models/../x", "/v1/models/%2e%2e/x", "/v1/models/a%00b"):
        assert served.client.get(path).status_code == 404
    assert [m["id"] for m in served.client.get("/v1/models").json()["data"]] == ["tiny"]
    assert not opened


def test_tokens_go_both_ways(served: Any) -> None:
    tokens = served.post("/tokenize", {"prompt": "a 猫<|end|>"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 6
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "a 猫<|end|>"}
    served.refused("/detokenize", {"tokens": [257]})
    served.refused("/tokenize", {})
    served.refused("/tokenize", {"prompt": "x", "messages": HI})


def test_the_engine_takes_no_tokens_at_all_as_a_length(served: Any) -> None:
    from deepinfer_core.sampling import SamplingParams

    handle = served.engine.submit(ids(served, "Hello"), SamplingParams(max_tokens=0, prompt_logprobs=0, n=2))
    result = handle.result(timeout=20)
    assert [(c.token_ids, c.finish_reason) for c in result.choices] == [((), "length")] * 2
    assert len(result.prompt_scores) == 5
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=0, min_tokens=1)
