"""A head is found however it is stored, and never made up (QW-07)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [(EMBEDDING,), (EMBEDDING, HEAD), (HEAD,)])
def test_a_tied_pair_is_the_same_tensor_whichever_of_it_is_stored(
    save_hf: Save, tensors: Tensors, stored: tuple[str, ...]
) -> None:
    pair = tensors[EMBEDDING].clone()
    for name in (EMBEDDING, HEAD):
        del tensors[name]
    tensors |= {name: pair.clone() for name in stored}
    checkpoint = open_checkpoint(save_hf(tensors, tie_word_embeddings=True))
    assert checkpoint.tied
    assert checkpoint.has(EMBEDDING)
    assert not checkpoint.has(HEAD)
    assert checkpoint.shape(EMBEDDING) == checkpoint.shape(HEAD) == (48, 64)
    assert torch.equal(checkpoint.tensor(EMBEDDING), pair)
    assert torch.equal(checkpoint.layer_tensors("lm_head")["weight"], pair)
    checkpoint.verify([EMBEDDING, HEAD, "model.norm.weight"])


def test_a_missing_head_of_an_untied_model_is_named(save_hf: Save, tensors: Tensors) -> None:
    del tensors[HEAD]
    checkpoint = open_checkpoint(save_hf(tensors))
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\): lm_head.weight"):
        checkpoint.verify([EMBEDDING, HEAD])
    with pytest.raises(CheckpointError, match=r"no tensor lm_head.weight"):
        checkpoint.layer_tensors("lm_head")


def test_a_missing_tied_pair_is_named(save_hf: Save, tensors: Tensors) -> None:
    del tensors[HEAD], tensors[EMBEDDING]
    checkpoint = open_checkpoint(save_hf(tensors, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\): model.embed_tokens.weight"):
        checkpoint.verify([EMBEDDING, HEAD])
