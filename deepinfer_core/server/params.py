"""From a request's fields to `SamplingParams`: one rule for both routes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_core.config import ServerConfig
from deepinfer_core.engine.grammar import Grammar, Grammars
from deepinfer_core.errors import RequestError
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.errors import bad_request
from deepinfer_core.server.wire import ResponseFormat, Sampling

SAME_NAME = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "deadline_ms",
)  # fmt: skip
"""Fields that mean to the engine what they mean on the wire; null leaves the engine's default."""


def sampling_params(body: Sampling, settings: ServerConfig, **more: Any) -> SamplingParams:
    """Return how to sample.

    Args:
        body: The request.
        settings: The limits.
        **more: What the route itself decides: ``max_tokens``, ``n``, ``logprobs``, ``constraint``, ...

    Raises:
        ApiError: 400 naming the field.
    """
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > settings.max_stop:
        raise bad_request(f"stop holds {len(stops)} strings: at most {settings.max_stop}", "stop")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is for streams alone: set stream = true, or leave it out", "stream_options")
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.top_k == -1:
        given["top_k"] = 0  # what others call all tokens
    try:
        return SamplingParams(**given, **more)
    except RequestError as error:
        named = re.match(r"(\w+)(?:\[[^\]]*\])? = ", str(error))
        raise bad_request(str(error), named and named[1]) from error


def constraint_of(form: ResponseFormat | None, body: Sampling, grammars: Callable[[], Grammars]) -> Grammar | None:
    """Return the grammar that a ``response_format`` asks for. It may take long: for a thread beside the loop.

    Raises:
        ApiError: 400: there is no schema, or it cannot be enforced.
    """
    if form is None or form.type == "text":
        return None
    schema: Mapping[str, Any] | None = None
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            text = "response_format of type json_schema needs json_schema = {name, schema}"
            raise bad_request(text, "response_format.json_schema")
        schema = form.json_schema.schema_
    require_free_end(body, "response_format")
    if schema is not None and len(json.dumps(schema)) > MAX_SCHEMA:
        raise bad_request(f"the schema is longer than {MAX_SCHEMA} characters", "response_format.json_schema")
    try:
        return grammars().json(schema)
    except RequestError as error:
        raise bad_request(str(error), "response_format") from error


def require_free_end(body: Sampling, what: str) -> None:
    """Refuse fields that would go on, or stop, where a grammar says otherwise."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(body, name):
            raise bad_request(f"{name} cannot be joined with {what}: the form says where the answer ends", name)


MAX_SCHEMA = 64 << 10
"""Characters of a schema: compiling takes time that grows with it."""
