"""Chooses the attention backend of a model, with a reason for every one that was not chosen."""

from __future__ import annotations

from attrs import frozen

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import AttentionBackendSpec, AttentionProblem
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.fit import capability_text
from deepinfer_core.registry.names import install_line


@frozen(kw_only=True)
class AttentionRejection:
    """An attention backend that was not chosen, and why."""

    spec: Registered[AttentionBackendSpec]
    reason: str

    def __str__(self) -> str:
        return f"{self.spec.spec.name} ({self.spec.origin}): {self.reason}"


@frozen(kw_only=True)
class AttentionSelection:
    """The attention backend of a model.

    Attributes:
        problem: What was asked.
        spec: What serves it.
        why: ``named``, ``only candidate`` or ``priority 20``.
        rejected: The others, with reasons.
    """

    problem: AttentionProblem
    spec: Registered[AttentionBackendSpec]
    why: str
    rejected: tuple[AttentionRejection, ...]


def select_attention(catalog: Catalog, problem: AttentionProblem, backend: str = "auto") -> AttentionSelection:
    """Choose an attention backend: the named one, else the highest priority among those that fit.

    Raises:
        SelectionError: The name is unknown or cannot serve (with the reason), nothing fits, or two tie.
    """
    asked = (
        f"attention with head_dim {problem.head_dim}, {problem.act_dtype} activations, {problem.kv_dtype} KV, "
        f"pages of {problem.page_size} on {problem.device}"
    )
    if backend != "auto":
        named = catalog.attention_backend(backend)
        misfit = attention_misfit(named.spec, problem)
        if misfit is not None:
            raise SelectionError(f"{asked}: the config names {named.spec.name!r} ({named.origin}), which {misfit}")
        others = (r for r in catalog.attention.values() if r.spec.name != named.spec.name)
        reason = f"the config names {named.spec.name!r}"
        rejected = tuple(AttentionRejection(spec=r, reason=reason) for r in others)
        return AttentionSelection(problem=problem, spec=named, why="named", rejected=rejected)
    fitting: list[Registered[AttentionBackendSpec]] = []
    rejections: list[AttentionRejection] = []
    for candidate in catalog.attention.values():
        misfit = attention_misfit(candidate.spec, problem)
        if misfit is None and candidate.spec.stability == "experimental":
            misfit = "is experimental: name it under [attention] backend to use it"
        if misfit is None:
            fitting.append(candidate)
        else:
            rejections.append(AttentionRejection(spec=candidate, reason=misfit))
    if not fitting:
        lines = [str(r) for r in rejections] or [f"none is installed; {install_line('attention backend', 'sdpa')}"]
        lines += [str(fault) for fault in catalog.faults]
        cause = catalog.faults[0].error if catalog.faults else None
        raise SelectionError(f"{asked}: no backend serves it" + "".join(f"\n  {x}" for x in lines)) from cause
    top = max(r.spec.priority for r in fitting)
    winners = [r for r in fitting if r.spec.priority == top]
    if len(winners) > 1:
        both = " and ".join(f"{r.spec.name!r} ({r.origin})" for r in winners)
        raise SelectionError(f"{asked}: {both} tie at priority {top}; name one under [attention] backend")
    chosen = winners[0]
    why = "only candidate" if len(fitting) == 1 else f"priority {top}"
    rejections += [
        AttentionRejection(spec=r, reason=f"outranked by {chosen.spec.name} ({why})") for r in fitting if r != chosen
    ]
    return AttentionSelection(problem=problem, spec=chosen, why=why, rejected=tuple(rejections))


def attention_misfit(spec: AttentionBackendSpec, problem: AttentionProblem) -> str | None:
    """Return why a backend cannot serve a model, or None when it can."""
    if problem.device not in spec.devices:
        return f"runs on {', '.join(spec.devices)}, asked for {problem.device}"
    if problem.device == "cuda" and spec.capability is not None and problem.capability not in spec.capability:
        return f"needs {spec.capability}, asked for {capability_text(problem.capability)}"
    lacking = [f for f in problem.features if f not in spec.features]
    if lacking:
        return f"lacks {', '.join(lacking)}, which this model needs"
    checks: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("activation dtype", problem.act_dtype, spec.act_dtypes),
        ("KV dtype", problem.kv_dtype, spec.kv_dtypes),
        ("page size", problem.page_size, spec.page_sizes or (problem.page_size,)),
        ("head_dim", problem.head_dim, spec.head_dims or (problem.head_dim,)),
    )
    for what, value, allowed in checks:
        if value not in allowed:
            return f"serves {what} {', '.join(map(str, allowed))}, asked for {value}"
    return None
