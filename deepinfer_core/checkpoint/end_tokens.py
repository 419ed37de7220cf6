"""The token ids that end a text: the union of everything a model's files say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer_core.errors import CheckpointError

GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def end_token_ids(sections: Iterable[tuple[str, Mapping[str, Any]]]) -> frozenset[int]:
    """Return the union of ``eos_token_id`` over config sections; each may be an id, a list of ids, or null.

    Args:
        sections: (file name for messages, its content).

    Raises:
        CheckpointError: An entry is none of these.
    """
    ids: set[int] = set()
    for source, section in sections:
        value = section.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool):
                raise CheckpointError(f"{source}: eos_token_id must be an id or a list of ids, got {value!r}")
            if item >= 0:  # some configs write -1 for none
                ids.add(item)
    return frozenset(ids)
