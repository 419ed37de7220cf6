"""The clients that people have: openai, langchain-openai, lm-eval and schemathesis, each as its users call it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


ENDS = {"125": 20}
"""A liking for the closing brace: a random model could write digits until its window ends."""


class Size(BaseModel):
    ok: bool
    rank: int


def test_openai_completes_chats_and_lists(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    text = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0, logprobs=2)
    assert text.usage is not None
    assert text.usage.completion_tokens == 5
    assert text.choices[0].logprobs is not None
    chat = client.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=5, logprobs=True, top_logprobs=1, extra_body={"top_k": 4}
    )
    assert chat.choices[0].finish_reason in ("length", "stop")
    assert chat.choices[0].logprobs is not None


def test_openai_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": HI, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    form: Any = {"model": "tiny", "messages": HI, "response_format": Size, "seed": 1, "logit_bias": ENDS}
    with client.chat.completions.stream(**form) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Size)
    pieces = client.completions.create(model="tiny", prompt="Hello", max_tokens=9, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == (
        client.completions.create(model="tiny", prompt="Hello", max_tokens=9, temperature=0).choices[0].text
    )


def test_openai_async_runs_many_at_once(served: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": f"{i % 3}"}], temperature=0, max_tokens=8,
                    stream=True,
                )  # fmt: skip
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one(i) for i in range(24)])

    texts = asyncio.run(ask())
    assert texts == texts[:3] * 8
    assert len(set(texts)) == 3


def test_openai_parses_into_a_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model="tiny", messages=HI, response_format=Size, temperature=1, seed=seed, logit_bias=ENDS
        )
        assert isinstance(parsed.choices[0].message.parsed, Size)


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    assert wrong.value.request_id is not None


def test_langchain_invokes_streams_batches_and_keeps_a_form(served: Any) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    where: Any = {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0, "model": "tiny"}
    chat = ChatOpenAI(**where, temperature=0, max_tokens=12)
    answer = chat.invoke([("system", "be kind"), ("human", "hi")])
    assert answer.usage_metadata is not None
    pieces = [piece.content for piece in chat.stream([("system", "be kind"), ("human", "hi")])]
    assert "".join(str(piece) for piece in pieces) == answer.content
    assert [a.content for a in chat.batch(["hi", "ho"])] == [chat.invoke("hi").content, chat.invoke("ho").content]
    formed = ChatOpenAI(**where, temperature=1, seed=1, logit_bias={125: 20}).with_structured_output(Size)
    assert isinstance(formed.invoke("hi"), Size)
    assert isinstance(OpenAI(**where, temperature=0, max_tokens=4).invoke("Hello"), str)


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_lm_eval_scores_as_with_transformers(
    served: Any, tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of 24 questions with three choices: the same accuracy, and each choice's log likelihood the same."""
    import warnings

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        words = ["red", "blue", "a pear", "seven", "the sea", "night", "of gold", "Hund"]
        rows = [
            {
                "question": f"{i}: which comes after {words[i % 8]}?",
                "choices": [words[(i + j * (1 + i % 3)) % 8] for j in range(1, 4)],
                "answer": i % 3,
            }
            for i in range(24)
        ]
        (tmp_path / "data.json").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        (tmp_path / "tiny_choice.yaml").write_text(TASK.format(data=tmp_path / "data.json"), encoding="utf-8")
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        shared: Any = {
            "tasks": ["tiny_choice"], "task_manager": manager, "log_samples": True, "bootstrap_iters": 0,
            "random_seed": None, "numpy_random_seed": None, "torch_random_seed": None, "fewshot_random_seed": None,
        }  # fmt: skip
        ours = simple_evaluate(
            model="local-completions",
            model_args={
                "model": "tiny", "base_url": f"{served.url}/v1/completions", "tokenizer": str(tiny_chat_model),
                "tokenized_requests": True, "max_length": 120, "batch_size": 4,
            },
            **shared,
        )  # fmt: skip
        theirs = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tiny_chat_model), "dtype": "float32", "max_length": 120},
            device="cpu", batch_size=4, **shared,
        )  # fmt: skip
    assert ours is not None
    assert theirs is not None
    for name in ("acc,none", "acc_norm,none"):
        assert ours["results"]["tiny_choice"][name] == theirs["results"]["tiny_choice"][name]
    assert 0 < ours["results"]["tiny_choice"]["acc,none"] < 1
    pairs = zip(ours["samples"]["tiny_choice"], theirs["samples"]["tiny_choice"], strict=True)
    for mine, other in pairs:
        assert mine["doc_id"] == other["doc_id"]
        for (a, greedy), (b, greedy_there) in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
            assert float(a) == pytest.approx(float(b), abs=2e-3)
            assert str(greedy) == str(greedy_there)


def test_schemathesis_finds_no_5xx(served: Any) -> None:
    """Requests made from /openapi.json, valid and not: nothing is answered with a 5xx."""
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    seen: list[int] = []
    for operation in schema.get_all_operations():
        asked = operation.ok()

        @hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.seed(7)
        @hypothesis.given(case=hypothesis.strategies.one_of(
            asked.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE),
            asked.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
        ))  # fmt: skip
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("model") is not None and len(seen) % 2:
                case.body["model"] = "tiny"  # else every request ends at its unknown model
            answer = case.call(timeout=20)
            seen.append(answer.status_code)
            case.validate_response(answer, checks=[not_a_server_error])

        ask()
    assert {200, 400, 404} <= set(seen)
    served.wait(served.idle)
    assert served.complete(prompt="x", max_tokens=1)["choices"]
