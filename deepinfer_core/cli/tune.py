"""``deepinfer tune``: measures the kernels for a model's shapes on this device; selection then goes by the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.cli.options import ConfigFile, Dtype, SetKeys, overrides, parse_counts


def command(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory (its config.json is enough) or GGUF file.")],
    config: ConfigFile = None,
    dtype: Dtype = None,
    sets: SetKeys = None,
    ms: Annotated[
        str | None, typer.Option("--m", metavar="M,...", help="Row counts to measure instead of the usual ones.")
    ] = None,
) -> None:
    """Measure every kernel that fits this model's layers on this card and store the table.

    Example: deepinfer tune models/m

    ``explain`` then shows the microseconds, and selection prefers what was measured to be fastest. Experimental
    kernels are measured too; they still run only when the config names or allows them.
    """
    import torch

    from deepinfer_core.assemble import catalog_for
    from deepinfer_core.bench import tune as measuring
    from deepinfer_core.cli.model_layers import layers_of_model
    from deepinfer_core.config import load_config
    from deepinfer_core.errors import KernelError
    from deepinfer_core.kernels.cubin_cache import cache_directory
    from deepinfer_core.plugin_api import LinearProblem
    from deepinfer_core.registry.explain import auto_dtype
    from deepinfer_core.registry.select import LinearChoice
    from deepinfer_core.registry.tuning import timings_path

    if not torch.cuda.is_available():
        raise KernelError("tune measures kernels on a CUDA device and none is here; `deepinfer doctor` says what is")
    settings = load_config(config, overrides(sets=sets, dtype=dtype)).config
    layers = layers_of_model(model)
    catalog, capability = catalog_for(settings), torch.cuda.get_device_capability()

    def linear_in(dtype: str) -> list[LinearProblem]:
        return [problem for _, problem in layers.problems(settings, "cuda", capability, dtype)]

    act_dtype: str = settings.dtype
    if act_dtype == "auto":
        act_dtype = auto_dtype(
            catalog, linear_in, lambda _: LinearChoice(), capability=capability, model_dtype=layers.spec.dtype
        )
    path = timings_path(torch.cuda.get_device_name(), cache_directory())
    rows = measuring.DEFAULT_MS if ms is None else parse_counts("--m", ms)
    measuring.tune(catalog, linear_in(act_dtype), path, ms=rows)
    print(f"table for {torch.cuda.get_device_name()} written to {path}; see it with: deepinfer explain {model}")
