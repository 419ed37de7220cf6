"""Carries a model's tokenizer into the converted checkpoint."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from deepinfer_core.checkpoint import Checkpoint
from deepinfer_core.checkpoint.gguf_model import GgufCheckpoint
from deepinfer_core.tokenizer import load_tokenizer

logger = logging.getLogger("deepinfer")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def carry_tokenizer(source: Checkpoint, directory: Path) -> None:
    """Copy tokenizer files as they are; from a GGUF file, write what transformers makes of its vocabulary.

    A model without a tokenizer is converted all the same, with a warning.
    """
    if isinstance(source, GgufCheckpoint):
        if "tokenizer.ggml.model" in source.metadata:
            load_tokenizer(source).save(directory)
            return
    else:
        found = [name for name in TOKENIZER_FILES if (source.tokenizer_path / name).is_file()]
        for name in found:
            shutil.copyfile(source.tokenizer_path / name, directory / name)
        templates = source.tokenizer_path / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, directory / templates.name)
        if found:
            return
    logger.warning("%s has no tokenizer; the result takes token ids only", source.path)
