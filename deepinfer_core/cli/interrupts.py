"""Ctrl-C from the first moment on: exit code 130 and one word, never a traceback out of a half-done import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_CODE = 130
WORD = "interrupted"


def leave_at_once() -> None:
    """Make Ctrl-C end the process on the spot, for as long as modules are being imported and nothing is in work.

    A KeyboardInterrupt that is raised inside an import may come out as any other error, or as none.
    """
    if _ours_to_handle():
        signal.signal(signal.SIGINT, _leave)


def leave_properly() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if _ours_to_handle() and signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Remembered:
    """While it holds, Ctrl-C raises KeyboardInterrupt as usual and is remembered.

    Attributes:
        happened: There was one: whatever error comes out of the work now came of it.
    """

    def __init__(self) -> None:
        self.happened = False

    def __enter__(self) -> Remembered:
        self._hook = sys.unraisablehook
        self._mine = _ours_to_handle() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *error: object) -> None:
        if self._mine:
            sys.unraisablehook = self._hook
            if signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        raise KeyboardInterrupt

    def _unraisable(self, what: UnraisableHookArgs) -> None:
        """Raise once more what came where nothing can be raised, such as in a destructor."""
        if issubclass(what.exc_type, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        else:
            self._hook(what)


class StopKey:
    """While it holds, the first Ctrl-C only asks to stop at the next `check`; a second one does not wait for that."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> StopKey:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise KeyboardInterrupt where nothing is half done, if it was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


def _ours_to_handle() -> bool:
    """Return whether handlers can be set here, and none but Python's own or ours is."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{WORD}\n".encode())
    os._exit(EXIT_CODE)
