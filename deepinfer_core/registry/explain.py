"""What serves each distinct layer shape and why, as plain rows for printing and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import evolve, frozen

from deepinfer_core.errors import DeepinferError
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.select import AttentionSelection, LinearChoice, Selection, select_linear
from deepinfer_core.registry.tuning import Timings


@frozen(kw_only=True)
class LinearExplanation:
    """One distinct problem, the layers that have it, and what serves it.

    Attributes:
        layers: Names of the layers.
        problem: What they ask.
        selection: What serves them; None when nothing can.
        error: Why nothing can.
    """

    layers: tuple[str, ...]
    problem: LinearProblem
    selection: Selection | None = None
    error: DeepinferError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; every value is JSON's own."""
        p, found = self.problem, self.selection
        return {
            "layers": list(self.layers),
            "scheme": p.scheme,
            "n": p.n,
            "k": p.k,
            "group_size": p.group_size,
            "zeros": p.zeros,
            "m_max": p.m_max,
            "device": p.device,
            "capability": None if p.capability is None else f"{p.capability[0]}.{p.capability[1]}",
            "dtype": p.act_dtype,
            "layout": found.layout.spec.name if found else None,
            "rows": [
                {
                    "m_from": row.m.lo,
                    "m_to": row.m.hi,
                    "kernel": row.kernel.spec.name,
                    "distribution": row.kernel.distribution,
                    "version": row.kernel.version,
                    "measured_us": row.measured_us,
                    "why": row.why,
                }
                for row in (found.table.rows if found else ())
            ],
            "rejected": [
                {
                    "kernel": r.kernel.spec.name,
                    "distribution": r.kernel.distribution,
                    "version": r.kernel.version,
                    "reason": r.reason,
                }
                for r in (found.rejected if found else ())
            ],
            "warnings": list(found.warnings) if found else [],
            "error": None if self.error is None else str(self.error),
        }


def explain_linear(
    catalog: Catalog,
    layers: Iterable[tuple[str, LinearProblem]],
    choice_for: Callable[[str], LinearChoice],
    timings: Timings | None = None,
) -> tuple[LinearExplanation, ...]:
    """Select for every distinct problem; a problem that nothing serves is explained too, not raised.

    Args:
        catalog: What is installed.
        layers: (layer name, what it asks); layers that differ only in bias or merged parts are one shape.
        choice_for: Scheme -> what the config asks.
        timings: The measured table of the device.
    """
    names: dict[LinearProblem, list[str]] = {}
    for name, problem in layers:
        names.setdefault(evolve(problem, bias=False, parts=()), []).append(name)
    explained = []
    for problem, group in names.items():
        try:
            selection = select_linear(catalog, problem, choice_for(problem.scheme), timings)
        except DeepinferError as error:
            explained.append(LinearExplanation(layers=tuple(group), problem=problem, error=error))
        else:
            explained.append(LinearExplanation(layers=tuple(group), problem=problem, selection=selection))
    return tuple(explained)


def attention_to_json(selection: AttentionSelection) -> dict[str, Any]:
    """Return plain data about the attention backend of a model."""
    return {
        "backend": selection.spec.spec.name,
        "distribution": selection.spec.distribution,
        "version": selection.spec.version,
        "why": selection.why,
        "rejected": [
            {
                "backend": r.spec.spec.name,
                "distribution": r.spec.distribution,
                "version": r.spec.version,
                "reason": r.reason,
            }
            for r in selection.rejected
        ],
    }


def auto_dtype(
    catalog: Catalog,
    problems_in: Callable[[str], Iterable[LinearProblem]],
    choice_for: Callable[[str], LinearChoice],
    *,
    capability: tuple[int, int] | None,
    model_dtype: str | None,
) -> str:
    """Return the activation dtype that "auto" means.

    On a card, the checkpoint's own 16-bit dtype (BF16 from 8.0 on). On a CPU, BF16 where every quantized layer gets a
    kernel at one row that was made for 16 bits (it does not serve float32), else float32: exact, and in torch fastest.

    Args:
        catalog: What is installed.
        problems_in: Dtype -> what the quantized layers ask in it.
        choice_for: Scheme -> what the config asks.
        capability: The card's; None on a CPU.
        model_dtype: What the model's config names.
    """
    if capability is not None:
        return "bfloat16" if model_dtype == "bfloat16" and capability >= (8, 0) else "float16"
    explained = explain_linear(catalog, (("", p) for p in problems_in("bfloat16")), choice_for)
    at_one_row = [e.selection.table.kernel_for(1).kernel.spec if e.selection is not None else None for e in explained]
    made_for_it = [spec is not None and "float32" not in spec.act_dtypes for spec in at_one_row]
    return "bfloat16" if made_for_it and all(made_for_it) else "float32"
