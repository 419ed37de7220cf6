"""Logits of every position of a text, straight through the model: for scoring, outside any batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepinfer_core.engine.batch import Model
from deepinfer_core.kvcache.manager import KVCache


@torch.inference_mode()
def text_logits(model: Model, kv: KVCache, tokens: Sequence[int], chunk_tokens: int) -> Iterator[torch.Tensor]:
    """Yield float32 logits ``[chunk, vocab]`` of every position, chunk after chunk; the pages come back at the end.

    Args:
        model: The model.
        kv: Its cache; nobody else may use it until the iterator is exhausted or closed.
        tokens: The text.
        chunk_tokens: Most tokens of one forward.

    Raises:
        OutOfPagesError: Running requests hold the pages that it needs.
    """
    seq = kv.open(reuse=False)
    try:
        for start in range(0, len(tokens), chunk_tokens):
            chunk = torch.tensor(tokens[start : start + chunk_tokens], dtype=torch.int64, device=kv.device)
            kv.extend(seq, len(chunk))
            rows = torch.arange(len(chunk), device=kv.device)
            yield model.forward(chunk, kv.batch([(seq, len(chunk))]), kv.tensors, rows)
            kv.commit(seq, len(chunk))
    finally:
        kv.free(seq, scrub=True)
