"""What every result says about where it comes from: device, processor, versions, date, commit, command."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

CUPY = ("cupy-cuda12x", "cupy-cuda13x")


def collect(device: torch.device | str) -> dict[str, Any]:
    """Return what holds for any measurement on a device.

    Args:
        device: Where the measured work runs; a card's name, capability and driver are recorded.
    """
    on_card = torch.device(device).type == "cuda"
    card = {
        "capability": list(torch.cuda.get_device_capability(device)) if on_card else None,
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
    }
    return {
        "device": torch.cuda.get_device_name(device) if on_card else "cpu",
        **(card if on_card else {}),
        "cpu": processor_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cupy": next((f"{d} {version(d)}" for d in CUPY if version(d)), "none"),
        "versions": plugin_versions(),
        "date": date.today().isoformat(),
        "commit": first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]),
        "command": command_line(sys.argv),
    }


def command_line(argv: Sequence[str]) -> str:
    """Return the command that runs, without the directory of its program."""
    return shlex.join([Path(argv[0]).name, *argv[1:]])


def plugin_versions() -> dict[str, str]:
    """Return the versions of core, of every distribution with a deepinfer plugin, and of transformers."""
    found = [entry.dist.name for entry in metadata.entry_points(group="deepinfer.plugins") if entry.dist is not None]
    return {name: version(name) or "unknown" for name in ("deepinfer-core", *sorted(set(found)), "transformers")}


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """Return the processor's model name; what the platform calls it where Linux's table is not there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def first_line(command: Sequence[str]) -> str:
    """Return the first line that a program prints; ``unknown`` when it is not there, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
