"""Which scheduling policy a config's name means; ``auto`` is core's own word."""

from __future__ import annotations

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import SchedulingPolicySpec
from deepinfer_core.registry.catalog import Catalog, Registered

AUTO_POLICY = "mixed"
"""What ``auto`` means until this device has a verdict of its own."""


def resolve_policy(catalog: Catalog, name: str) -> Registered[SchedulingPolicySpec]:
    """Return the policy of that name.

    Raises:
        SelectionError: The name is not registered: with the nearest, the ``pip install`` line, or what the installed
            policies distribution says.
    """
    if name != "auto":
        return catalog.policy(name)
    try:
        return catalog.policy(AUTO_POLICY)
    except SelectionError as error:
        raise SelectionError(f'policy = "auto" means {AUTO_POLICY!r}: {error}') from error
