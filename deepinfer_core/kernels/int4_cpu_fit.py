"""Whether the installed torch has the int4 CPU matmul; asked before torch is imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from deepinfer_core.plugin_api import LinearProblem

_FIRST = (2, 6)  # torch 2.5 had another operator, for another order of bytes


def misfit(problem: LinearProblem) -> str | None:
    """Return why torch's int4 CPU matmul cannot serve a problem, or None."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None  # built from source without metadata: such a torch is not an old one
    match = re.match(r"(\d+)\.(\d+)", installed)
    if match is not None and (int(match[1]), int(match[2])) < _FIRST:
        return f"needs torch {_FIRST[0]}.{_FIRST[1]} or newer, installed is {installed}"
    return None
