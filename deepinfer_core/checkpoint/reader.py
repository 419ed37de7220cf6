"""Opens a model by its path: a deepinfer checkpoint, Hugging Face safetensors, or GGUF."""

from __future__ import annotations

from pathlib import Path

from deepinfer_core.checkpoint.base import Checkpoint
from deepinfer_core.checkpoint.foreign import PICKLE_SUFFIXES, refuse_pickles
from deepinfer_core.checkpoint.gguf_model import GgufCheckpoint
from deepinfer_core.checkpoint.safetensors_model import SafetensorsCheckpoint
from deepinfer_core.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"
"""Ending of a directory that a conversion is still writing."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model and check its files; no tensor is read yet.

    Args:
        path: A directory with config.json and safetensors (ours or Hugging Face's), a GGUF file, or a directory with
            exactly one GGUF file.

    Raises:
        CheckpointError: Nothing is there, files are missing, cut or contradictory, or the weights are in a format that
            this release does not read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a model directory or a .gguf file")
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{path} is the unfinished output of a conversion that was interrupted; run it again")
    if path.is_file():
        return _open_file(path)
    files = sorted(f for f in path.iterdir() if f.is_file())
    if any(f.suffix == ".safetensors" or f.name.endswith(".safetensors.index.json") for f in files):
        return SafetensorsCheckpoint(path)
    ggufs = [f for f in files if f.suffix == ".gguf"]
    if len(ggufs) == 1:
        return GgufCheckpoint(ggufs[0])
    if ggufs:
        raise CheckpointError(
            f"{path} holds {len(ggufs)} GGUF files; name the one to load: {', '.join(f.name for f in ggufs)}"
        )
    refuse_pickles(path, files)
    if not files:
        raise CheckpointError(f"{path} is an empty directory; it should hold config.json and safetensors, or a .gguf")
    raise CheckpointError(
        f"{path} holds no weights: no .safetensors and no .gguf among {', '.join(f.name for f in files[:6])}"
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.suffix in PICKLE_SUFFIXES:
        refuse_pickles(path.parent, [path])
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the directory {path.parent}, which holds the model's config too")
    raise CheckpointError(f"{path} is neither a model directory nor a .gguf file")
