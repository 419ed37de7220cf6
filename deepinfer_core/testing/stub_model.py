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
    """The part of an attention backend that a KV cache needs: a page holds the tokens themselves, plus one."""

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

    Args:
        vocab: Tokens there are.
    """

    def __init__(self, vocab: int = 1000) -> None:
        self.vocab = vocab
        self._weights = torch.ones(1, dtype=torch.int64)

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
        ends = torch.tensor(batch.query_lens).cumsum(0)
        hashes = []
        for row in logit_rows.tolist():
            request = int(torch.searchsorted(ends, row, right=True))
            length = int(batch.positions[row]) + 1
            pages = batch.page_table[request, : -(-length // store.shape[1])].long()
            hashes.append(self._hash(store[pages].view(-1)[:length]))
        return self._logits(torch.tensor(hashes, dtype=torch.int64))

    def answer(self, prompt: Sequence[int], count: int, end_ids: Sequence[int] = ()) -> list[int]:
        """Return the ``count`` tokens of a greedy answer, or fewer up to the first end token."""
        tokens = list(prompt)
        for _ in range(count):
            context = torch.tensor(tokens, dtype=torch.int64) + 1
            tokens.append(int(self._logits(torch.tensor([self._hash(context)])).argmax()))
            if tokens[-1] in end_ids:
                break
        return tokens[len(prompt) :]

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[vocab]`` behind a context."""
        return self._logits(torch.tensor([self._hash(torch.tensor(list(context), dtype=torch.int64) + 1)]))[0]

    def _hash(self, context: torch.Tensor) -> int:
        assert bool((context > 0).all()), "a position of the context was never stored"
        if len(context) > len(self._weights):
            weights = [1]
            while len(weights) < 2 * len(context):
                weights.append(weights[-1] * _BASE % _PRIME)
            self._weights = torch.tensor(weights, dtype=torch.int64)
        return int((context * self._weights[: len(context)] % _PRIME).sum()) % _PRIME

    def _logits(self, hashes: torch.Tensor) -> torch.Tensor:
        ranks = (torch.arange(1, self.vocab + 1) * _SPREAD + hashes[:, None] * 7919) % _PRIME
        return ranks.float() * (10 / _PRIME)
