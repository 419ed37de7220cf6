"""Model files: Hugging Face safetensors, GGUF and deepinfer checkpoints, read and written one tensor at a time."""

from deepinfer_core.checkpoint.base import Checkpoint
from deepinfer_core.checkpoint.format import DENSE, LayerFormat, LayerPatterns
from deepinfer_core.checkpoint.reader import open_checkpoint

__all__ = ["DENSE", "Checkpoint", "LayerFormat", "LayerPatterns", "open_checkpoint"]
