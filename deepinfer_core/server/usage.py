"""Counting tokens of a response, also while it streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core.server.generation import Event, Generation


class Usage:
    """What a generation has used so far, counted from its events."""

    def __init__(self) -> None:
        self.generated = 0
        self._ended = 0

    def count(self, events: Sequence[Event], generation: Generation) -> None:
        """Take events in."""
        for news in events:
            if news.output is None:
                self._ended += 1
            elif news.output.token is not None:
                self.generated += 1

    def complete(self, generation: Generation) -> bool:
        """Return True when every prompt's end was counted."""
        return self._ended == len(generation.handles)

    def report(self, generation: Generation) -> dict[str, Any]:
        """Return OpenAI's ``usage``: each prompt once, whatever ``n`` is."""
        prompt = sum(len(handle.prompt_ids) for handle in generation.handles)
        cached = sum(handle.metrics[0].cached_tokens for handle in generation.handles)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
