"""Checks every name in a config against the catalog before anything is loaded, naming file and key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from deepinfer_core.errors import SelectionError
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.choice import LinearSettings
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.registry.policy import resolve_policy


def check_names(
    catalog: Catalog,
    *,
    linear: Mapping[str, LinearSettings],
    attention: str,
    policy: str,
    describe: Callable[[str], str],
) -> None:
    """Check schemes, backends, pinned kernels, attention backend and policy of a config.

    Args:
        catalog: What is installed.
        linear: Scheme -> settings.
        attention: Attention backend or ``"auto"``.
        policy: Scheduling policy or ``"auto"``.
        describe: Dotted key -> how a message names it, with its file (``ResolvedConfig.describe``).

    Raises:
        SelectionError: A name is not registered; the original error of a failed plugin is its cause.
    """
    checks: list[tuple[str, Callable[[], object]]] = []
    for scheme, settings in linear.items():
        key = f"linear.{scheme}"
        checks.append((key, partial(catalog.scheme, scheme)))
        if settings.backend != "auto":
            checks.append((f"{key}.backend", partial(catalog.backend, settings.backend)))
        for m, kernel in settings.kernels.items():
            if kernel != FALLBACK:
                checks.append((f"{key}.kernels.{m}", partial(catalog.kernel, kernel)))
    if attention != "auto":
        checks.append(("attention.backend", partial(catalog.attention_backend, attention)))
    if policy != "auto":
        checks.append(("scheduler.policy", partial(resolve_policy, catalog, policy)))
    for key, look_up in checks:
        try:
            look_up()
        except SelectionError as error:
            raise SelectionError(f"{describe(key)}: {error}") from error.__cause__
