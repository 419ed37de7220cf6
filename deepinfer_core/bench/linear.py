"""`deepinfer bench linear`: our kernels, the fallback and other people's, side by side in one run on one card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from deepinfer_core.bench.kernel_bench import KernelBench, relative_error, time_peer
from deepinfer_core.bench.meta import collect
from deepinfer_core.bench.peers import PEERS, Peer
from deepinfer_core.bench.results import BenchError
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.timing import copies_for, read_bandwidth_gbs
from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.dispatch import fallback_spec
from deepinfer_core.registry.select import LinearChoice, select_linear

MAX_REL_ERR = 2e-3
"""Largest relative error against float32 with FP16 out."""

MAX_REL_ERRS = {"float16": MAX_REL_ERR, "bfloat16": 1e-2, "float32": 1e-4}
"""The same by the dtype of the result; a row beyond it is wrong, and `require_right` fails."""

FULL_MS = (1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 30, 32, 33, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
FULL_SHAPES = (
    *((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)),  # Qwen2.5-3B: qkv, o, gate and up, down
    *((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),  # Qwen2.5-7B
    *((5632, 2048), (2048, 5632)),
)
"""The grid that `bench.bounds` judges: every row count at which a kernel changes, and the layers of two models."""

ROW_KEY = ("scheme", "m", "n", "k", "group_size", "zeros", "act_dtype", "kernel")


@frozen(kw_only=True)
class LinearBenchSpec:
    """What to measure.

    Attributes:
        schemes: Weight schemes.
        shapes: (N, K) pairs.
        ms: Row counts.
        group_size: Codes a scale.
        zeros: Layers store zeros.
        act_dtype: Dtype of x and out.
        choice_for: Scheme -> backend, pins and experimental flag as in a config.
        kernels: Measure these kernels instead of the selected one; empty for the selected one.
        peers: Measure cuBLAS, tinygemm, humming and the fallback too.
        replays: Measured replays of each graph.
    """

    schemes: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    ms: tuple[int, ...]
    group_size: int = 128
    zeros: bool = False
    act_dtype: str = "float16"
    choice_for: Callable[[str], LinearChoice] = lambda _: LinearChoice()
    kernels: tuple[str, ...] = ()
    peers: bool = True
    replays: int = 7


def run(catalog: Catalog, spec: LinearBenchSpec, report: Callable[[str], object] = print) -> dict[str, Any]:
    """Measure and return the result file's content: ``{meta, rows}``.

    Raises:
        KernelError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KernelError("bench linear measures CUDA kernels and no CUDA device is here")
    read_gbs = read_bandwidth_gbs()
    report(f"{torch.cuda.get_device_name()}: reads {read_gbs:.0f} GB/s at most")
    rows: list[dict[str, Any]] = []
    for scheme in spec.schemes:
        for n, k in spec.shapes:
            problem = LinearProblem(
                n=n,
                k=k,
                m_max=max(spec.ms),
                device="cuda",
                capability=torch.cuda.get_device_capability(),
                act_dtype=spec.act_dtype,
                scheme=scheme,
                group_size=spec.group_size,
                zeros=spec.zeros,
            )
            for row in _problem_rows(catalog, problem, spec, read_gbs):
                rows.append(row)
                report(_line(row))
    return {"meta": {**collect("cuda"), "read_gbs": round(read_gbs)}, "rows": rows}


def require_right(result: Mapping[str, Any]) -> None:
    """Check that every kernel computed what it should have; a fast wrong result is none, and is not written down.

    Raises:
        KernelError: Naming the first row that is wrong.
    """
    wrong = [row for row in result["rows"] if not is_right(row)]
    if wrong:
        raise KernelError(
            f"{len(wrong)} of {len(result['rows'])} rows are wrong, the first: {wrong[0]['kernel']} at "
            f"{wrong[0]['m']} x {wrong[0]['n']} x {wrong[0]['k']} with a relative error of {wrong[0]['rel_err']:.1e}; "
            f"at most {MAX_REL_ERRS[wrong[0]['act_dtype']]:.0e} is right"
        )


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether a row's kernel computed the product; a result with NaN has an infinite error."""
    return bool(row["rel_err"] < MAX_REL_ERRS[row["act_dtype"]])


def merged(earlier: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Add an earlier file's rows to a result; a cell measured again is the new one, and both runs' metas are kept.

    Raises:
        BenchError: The two were measured on different devices.
    """
    before, now = earlier["meta"], result["meta"]
    if before["device"] != now["device"]:
        raise BenchError(f"the file to merge into is of {before['device']}, this run is of {now['device']}")
    rows = {tuple(row[name] for name in ROW_KEY): row for row in (*earlier["rows"], *result["rows"])}
    short = {name: before.get(name) for name in ("date", "commit", "command", "read_gbs")}
    return {"meta": {**now, "earlier": [*before.get("earlier", []), short]}, "rows": list(rows.values())}


def _problem_rows(
    catalog: Catalog, problem: LinearProblem, spec: LinearBenchSpec, read_gbs: float
) -> Iterable[dict[str, Any]]:
    bench = KernelBench(catalog, problem, replays=spec.replays)
    selection = select_linear(catalog, problem, spec.choice_for(problem.scheme))
    chosen = {m: selection.table.kernel_for(m).kernel for m in spec.ms}
    plan: dict[str, tuple[Registered[LinearKernelSpec], list[int]]] = {}
    for m in spec.ms:
        for name in spec.kernels or (chosen[m].spec.name,):
            kernel = chosen[m] if name == chosen[m].spec.name else catalog.kernel(name)
            if m in kernel.spec.m and kernel.spec.scheme == problem.scheme:
                plan.setdefault(name, (kernel, []))[1].append(m)
    names = ("us_fp16", "us_fallback", "us_tinygemm", "us_humming")
    columns: dict[int, dict[str, float | None]] = {m: dict.fromkeys(names) for m in spec.ms}
    if spec.peers:
        fallback = _fallback(catalog, problem)
        with bench.loaded(fallback) as measure:
            for m in spec.ms:
                columns[m]["us_fallback"] = measure(m).timing.us
        for peer in PEERS:
            for m, us in _peer_times(peer, bench, spec.ms, spec.replays).items():
                columns[m][f"us_{peer.name}"] = us
    for kernel, ms in plan.values():
        with bench.loaded(kernel) as measure:
            for m in ms:
                measured = measure(m)
                moved = bench.floor_bytes + 2 * m * (problem.n + problem.k)
                yield {
                    "scheme": problem.scheme,
                    "m": m,
                    "n": problem.n,
                    "k": problem.k,
                    "group_size": problem.group_size,
                    "zeros": problem.zeros,
                    "act_dtype": problem.act_dtype,
                    "layout": kernel.spec.layout,
                    "kernel": kernel.spec.name,
                    "us": round(measured.timing.us, 3),
                    "us_floor": round(moved / read_gbs / 1e3, 3),
                    "rel_err": measured.rel_err,
                    **{name: None if us is None else round(us, 3) for name, us in columns[m].items()},
                    "spread": round(measured.timing.spread, 4),
                }


def _fallback(catalog: Catalog, problem: LinearProblem) -> Registered[LinearKernelSpec]:
    """Return dequantize + matmul over the canonical rows, the honest baseline of every scheme."""
    layouts = [s for s in catalog.layouts.values() if s.spec.scheme == problem.scheme and "cuda" in s.spec.devices]
    rows = next((s for s in layouts if ".rows." in s.spec.name), layouts[0])
    return Registered.by_core(fallback_spec(rows.spec, problem))


def _peer_times(peer: Peer, bench: KernelBench, ms: Sequence[int], replays: int) -> dict[int, float | None]:
    problem = bench.problem
    if peer.reason_against(problem) is not None:
        return dict.fromkeys(ms)
    nbytes = bench.floor_bytes if peer.name != "fp16" else 2 * problem.n * problem.k
    times: dict[int, float | None] = {}
    try:
        prepared = peer.prepare(problem, bench.weight)
        copies = [prepared.call] + [prepared.copy() for _ in range(copies_for(nbytes) - 1)]
        for m in ms:
            x, expected = bench.inputs(m)
            x = x.to(getattr(peer, "act_dtype", x.dtype))
            error = relative_error(copies[0](x), expected)
            times[m] = time_peer(copies, x, replays).us if error < prepared.tolerance else None
    except Exception as error:
        # Somebody else's kernel may refuse a shape or fail to compile on this card; ours are still worth measuring.
        print(f"  peer {peer.name} failed on {problem.n} x {problem.k}: {' '.join(str(error).split())[:200]}")
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return {m: times.get(m) for m in ms}


def _line(row: dict[str, Any]) -> str:
    peers = "  ".join(f"{k[3:]} {v:.1f}" for k, v in row.items() if k.startswith("us_") and v and k != "us_floor")
    share = row["us_floor"] / row["us"]
    wrong = "" if is_right(row) else "  WRONG"
    return (
        f"{row['scheme']} {row['m']:>4} x {row['n']} x {row['k']}  {row['kernel']:<28} {row['us']:8.2f} us "
        f"({share:.0%} of reads, +-{row['spread']:.1%}, err {row['rel_err']:.1e}){wrong}  {peers}"
    )
