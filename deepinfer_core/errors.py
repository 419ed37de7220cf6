"""Every error a user or a plugin author can cause: what was asked, what is possible, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeepinferError(Exception):
    """Base of all errors raised on purpose; the command line prints its text alone, without a traceback."""

    exit_code = 1


class ConfigError(DeepinferError):
    """A config file, flag or keyword holds an unknown key, a wrong type or an impossible value."""

    exit_code = 2


class PluginError(DeepinferError):
    """A plugin could not be loaded, or its descriptors break the contract."""

    exit_code = 3


class SelectionError(DeepinferError):
    """No installed kernel, layout, attention backend or policy can serve what was asked."""

    exit_code = 4


class CheckpointError(DeepinferError):
    """A model file is missing, cut, contradictory or of a kind that cannot be read."""

    exit_code = 5


class ModelError(DeepinferError):
    """A model's config asks for an architecture or a feature that the decoder does not have."""

    exit_code = 5


class KernelError(DeepinferError):
    """A kernel could not be compiled or launched, or was called with tensors that it does not take."""

    exit_code = 6


class CapacityError(DeepinferError):
    """A request or a model does not fit the memory or the length that it was given."""

    exit_code = 7


class RequestError(DeepinferError):
    """A request asks for what cannot be served: a sampling value, a message list, a prompt, a missing feature."""

    exit_code = 2


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the tail of an "unknown name" message: the nearest right one, and all that exist.

    Args:
        name: What was asked for.
        known: The names that would have been right.

    Returns:
        For example ``"did you mean 'serial'? known: mixed, serial"``; ``"none are known"`` when there are none.
    """
    names = sorted(set(known))
    if not names:
        return "none are known"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
