"""A model without weights whose every token depends on its whole context, read back through the KV pages.

A wrong page, position or row changes the text, so that an engine's mistakes show as wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deepinfer_core.plugin_api import AttentionBatch

_PRIME = 1_000_003
_BASE = 31
_SPREAD = 2_654_435_761 % _PRIME


class StubBackend:
    """What a KV cache needs of an attention backend: a page holds the tokens themselves, plus one."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return one tensor of tokens; 0 stands for nothing."""
        return {"tokens": ((pages, self.page_size), "int64")}

    def copy_page(self, kv: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one page."""
        kv["tokens"][target] = kv["tokens"][source]


class StubModel:
    """Logits are a permutation of ``vocab`` different values, chosen by a hash of all tokens up to the row.

    A row whose context has a position that was never stored gets NaN. On a card nothing waits for the device.

    Args:
        vocab: Tokens there are.
        longest: Longest context, in tokens.
        device: Where it runs.
    """

    def __init__(self, vocab: int = 1000, longest: int = 16_384, device: torch.device | str = "cpu") -> None:
        weights = [1]
        for _ in range(longest - 1):
            weights.append(weights[-1] * _BASE % _PRIME)
        self.vocab = vocab
        self._weights = torch.tensor(weights, dtype=torch.int64, device=device)
        self._ranks = torch.arange(1, vocab + 1, device=device) * _SPREAD

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[Mapping[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Store the tokens at their slots; return float32 logits ``[rows, vocab]`` from what the pages then hold."""
        store = kv[0]["tokens"]
        store.view(-1)[batch.slots] = tokens + 1
        owners = torch.tensor([row for row, n in enumerate(batch.query_lens) for _ in range(n)], dtype=torch.int64)
        if store.is_cuda:
            owners = owners.pin_memory().to(store.device, non_blocking=True)
        lengths = batch.positions[logit_rows] + 1
        return self._logits(store[batch.page_table[owners[logit_rows]].long()].flatten(1), lengths)

    def answer(self, prompt: Sequence[int], count: int, end_ids: Sequence[int] = ()) -> list[int]:
        """Return the ``count`` tokens of a greedy answer, or fewer up to the first end token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
            if tokens[-1] in end_ids:
                break
        return tokens[len(prompt) :]

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[vocab]`` behind a context."""
        stored = torch.tensor([list(context)], dtype=torch.int64, device=self._ranks.device) + 1
        return self._logits(stored, torch.full((1,), len(context), device=self._ranks.device))[0]

    def _logits(self, stored: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        width = stored.shape[1]
        seen = torch.arange(width, device=stored.device) < lengths[:, None]
        hashes = (stored * self._weights[:width] % _PRIME * seen).sum(1) % _PRIME
        logits = (self._ranks + hashes[:, None] * 7919) % _PRIME * (10 / _PRIME)
        return logits.float().masked_fill((seen & (stored == 0)).any(1)[:, None], float("nan"))
