"""A progress bar on standard error that stays away from pipes and logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, unit: str, *, shown: bool | None = None) -> Iterator[Callable[[int], int]]:
    """Yield a function that takes how many are done, shows it, and returns it.

    Args:
        total: How many there are.
        unit: What is counted.
        shown: None for more than one in a terminal.
    """
    if not (sys.stderr.isatty() and total > 1 if shown is None else shown):
        yield lambda done: done
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(unit, total=total)

        def show(done: int) -> int:
            bar.update(task, completed=done)
            return done

        yield show
