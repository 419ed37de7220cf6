"""How names are compared, and which distribution is known to bring a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

WELL_KNOWN: Mapping[str, Mapping[str, str]] = {
    "scheme": {
        "fp16": "deepinfer-plugin-fp16",
        "w4a16": "deepinfer-plugin-w4a16",
        "w3a16": "deepinfer-plugin-w3a16",
    },
    "linear backend": {
        "fp16": "deepinfer-plugin-fp16",
        "w4a16": "deepinfer-plugin-w4a16",
        "w3a16": "deepinfer-plugin-w3a16",
    },
    "recipe": {
        "w4": "deepinfer-plugin-w4a16",
        "w3": "deepinfer-plugin-w3a16",
        "mixed": "deepinfer-plugin-w3a16",
    },
    "attention backend": {"sdpa": "deepinfer-plugin-fp16", "paged": "deepinfer-plugin-fp16"},
    "scheduling policy": dict.fromkeys(
        ("serial", "dual_stream", "mixed", "time_sliced", "slo"), "deepinfer-plugin-policies"
    ),
}
"""Names of the project's own distributions, for the ``pip install`` line of an error; never imported from here."""

_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def normalized(name: str) -> str:
    """Return the form in which names are compared: lower case, runs of ``-``, ``_`` and ``.`` alike."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def find(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is meant: the same text, or the only one that is equal after normalization."""
    names = list(known)
    if name in names:
        return name
    alike = [other for other in names if normalized(other) == normalized(name)]
    return alike[0] if len(alike) == 1 else None


def install_line(kind: str, name: str, distribution: str | None = None) -> str | None:
    """Return the ``pip install`` line that brings a name, when one is known.

    Args:
        kind: A key of ``WELL_KNOWN``, such as ``"scheme"``.
        name: What was asked for.
        distribution: Who brings it according to the checkpoint; used for names that are not well known.

    Returns:
        The line, or None. A distribution from a file is repeated only when it has the form of a project name.
    """
    known = WELL_KNOWN.get(kind, {})
    match = find(name, known)
    if match is not None:
        return f"pip install {known[match]}"
    if distribution and _DISTRIBUTION.fullmatch(distribution):
        return f"pip install {distribution} (the name comes from the checkpoint: check who publishes it)"
    return None
