"""Where the process begins: Ctrl-C is in order before anything large is imported."""

from __future__ import annotations

from deepinfer_core.cli.interrupts import leave_at_once, leave_properly


def main() -> int:
    """Import the command line and run it; returns the exit code."""
    leave_at_once()
    from deepinfer_core.cli.main import main as run

    leave_properly()
    return run()
