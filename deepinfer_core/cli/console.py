"""Where tables are printed: as wide as the terminal, or wide enough for every name when the output is a file."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 220


def console(*, stderr: bool = False) -> Console:
    """Return a rich console; a pipe or a file gets wide lines, so that names are never cut."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, width=FILE_WIDTH)
    return made
