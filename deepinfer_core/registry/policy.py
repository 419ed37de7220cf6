"""Which scheduling policy a config's name means; ``auto`` is core's own word."""

from __future__ import annotations

from deepinfer_core.plugin_api import SchedulingPolicySpec
from deepinfer_core.registry.catalog import Catalog, Registered


def resolve_policy(catalog: Catalog, name: str) -> Registered[SchedulingPolicySpec] | None:
    """Return the policy of that name, or None for ``auto``, which `assemble` turns into one that is installed.

    Raises:
        SelectionError: The name is not registered: with the nearest, the ``pip install`` line, or what the installed
            policies distribution says.
    """
    return None if name == "auto" else catalog.policy(name)
