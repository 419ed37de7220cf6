"""Runs Python in a process of its own, where chosen imports raise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HEAVY = ("torch", "cupy", "transformers")

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ImportError(f'{{name}} must not be imported here')
        return None

sys.meta_path.insert(0, Blocker())
"""

RunWithout = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_without(tmp_path: Path) -> RunWithout:
    """Return a function that runs code where importing some modules raises, with extra folders on sys.path."""

    def run(
        code: str, *, blocked: Sequence[str] = HEAVY, path: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(BLOCKER.format(blocked=tuple(blocked)) + code, encoding="utf-8")
        folders = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "DEEPINFER_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120, check=False
        )

    return run
