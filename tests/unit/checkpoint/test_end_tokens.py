"""A text ends at any id that one of the model's files names (MF-06)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (0, [2, 7], {0, 2, 7}),
        ([1, 2], 2, {1, 2}),
        (None, [7], {7}),
        (3, None, {3}),
        (None, None, set()),
        (-1, [5], {5}),
        ([None, 4], [], {4}),
    ],
)
def test_ids_of_all_files_are_joined(
    save_hf: Save, tensors: dict[str, torch.Tensor], config: Any, generation: Any, expected: set[int]
) -> None:
    directory = save_hf(tensors, eos_token_id=config)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_checkpoint(directory).eos_token_ids() == expected


def test_missing_files_and_keys_add_nothing(save_hf: Save, tensors: dict[str, torch.Tensor]) -> None:
    assert open_checkpoint(save_hf(tensors)).eos_token_ids() == frozenset()
    assert open_checkpoint(save_hf(tensors, name="b", eos_token_id=9)).eos_token_ids() == {9}


@pytest.mark.parametrize("value", ["2", [1, "2"], True, 2.0, {"id": 2}])
def test_an_entry_that_is_no_id_is_named(save_hf: Save, tensors: dict[str, torch.Tensor], value: Any) -> None:
    checkpoint = open_checkpoint(save_hf(tensors, eos_token_id=value))
    with pytest.raises(CheckpointError, match=r"config: eos_token_id must be an id or a list of ids"):
        checkpoint.eos_token_ids()
