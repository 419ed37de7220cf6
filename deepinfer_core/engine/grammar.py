"""Grammars: answers that are JSON of a schema, or of a grammar's form, through llguidance (the extra ``server``)."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.tokenizer import Tokenizer

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Between the values of a JSON answer stands what Python's json writes: free white space lets small models write it for
ever."""


class Grammars:
    """Compiles grammars for one model's tokens. Any thread may; compiling releases the interpreter.

    Args:
        tokenizer: The model's.
        vocab_size: Width of its logits.

    Raises:
        ConfigError: llguidance is not installed.
        RequestError: The tokenizer has no form that llguidance reads, or no end token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "structured output needs llguidance, which is not installed: pip install 'deepinfer-core[server]'"
            ) from error
        text = tokenizer.fast_json()
        ends = sorted(end for end in tokenizer.eos_ids if end < vocab_size)
        if text is None or not ends:
            missing = "an end token" if text is not None else "a tokenizer.json"
            raise RequestError(f"this model cannot write to a form (response_format, forced tools): it lacks {missing}")
        self._ll: Any = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        self._ends = ends

    def json(self, schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of JSON values of a schema; of any JSON object without one.

        Raises:
            RequestError: The schema is none, or asks for what the library cannot enforce.
        """
        wanted = {"type": "object"} if schema is None else dict(schema)
        try:
            text = self._ll.LLMatcher.grammar_from_json_schema(json.dumps(wanted), overrides=JSON_FORM)
        except ValueError as error:
            raise _refused(error) from error
        return self._compiled(text)

    def tagged(self, before: str, schema: Mapping[str, Any], after: str) -> Grammar:
        """Return the grammar of a JSON value of a schema between two fixed texts.

        Raises:
            RequestError: As for `json`.
        """
        inner = json.dumps({"x-guidance": JSON_FORM, **schema})
        text = f"start: {json.dumps(before)} value {json.dumps(after)}\nvalue: %json {inner}\n"
        try:
            compiled = self._ll.LLMatcher.grammar_from_lark(text)
        except ValueError as error:
            raise _refused(error) from error
        return self._compiled(compiled)

    def _compiled(self, text: str) -> Grammar:
        matcher = self._ll.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Grammar(matcher, self._ends)


class Grammar:
    """A compiled grammar; a call makes the constraint of one answer (``SamplingParams(constraint=grammar)``)."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = tuple(ends)
        self._lock = threading.Lock()

    def __call__(self) -> GrammarConstraint:
        """Return a constraint at the grammar's start."""
        with self._lock:
            return GrammarConstraint(self._matcher.deep_copy(), self._ends)


class GrammarConstraint:
    """One answer on its way through a grammar: see `deepinfer_core.sampling.TokenConstraint`."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = list(ends)

    def allowed(self, vocab: int, /) -> torch.Tensor:
        """Return which tokens the grammar allows next; behind its end, or a fault of the library, the end tokens."""
        mask = torch.zeros(vocab, dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            width = min(vocab, len(bits))
            mask[:width] = torch.from_numpy(bits[:width]).bool()
        if self._matcher.is_stopped() or not mask.any():
            mask.zero_()
            mask[self._ends] = True
        return mask

    def accept(self, token: int, /) -> None:
        """Go on behind a token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def _refused(error: object) -> RequestError:
    first = (str(error).strip().splitlines() or ["unknown fault"])[0][:300]
    return RequestError(f"the JSON schema or grammar cannot be enforced: {first}")
