"""Weight files and formats that this release does not read, refused by name: never run, never taken for fp16."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_core.checkpoint.format import QUANT_METHOD
from deepinfer_core.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_FOREIGN_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "quanto": "Quanto",
    "eetq": "EETQ",
    "torchao": "torchao",
    "auto-round": "AutoRound",
}

_FOREIGN_TENSORS = (
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "GPTQ or AWQ"),
    (re.compile(r"\.(weight_packed|weight_shape|weight_zero_point)$"), "compressed-tensors"),
    (re.compile(r"\.weight\.(absmax|quant_map|quant_state\..*|nested_absmax)$|\.SCB$"), "bitsandbytes"),
    (re.compile(r"\.(weight_scale|weight_scale_inv|input_scale)$"), "FP8 or INT8"),
    (re.compile(r"\.(W_q|codebooks|codes)$"), "HQQ or AQLM"),
)

_WHAT_WORKS = (
    "this release reads dense safetensors, GGUF and deepinfer checkpoints; take the model's original safetensors or a "
    "GGUF file and run: deepinfer quantize SRC DST --recipe w4"
)


def refuse_pickles(path: Path, files: Iterable[Path]) -> None:
    """Refuse a directory (or file) whose weights are pickles.

    Raises:
        CheckpointError: Naming the files; they are not opened.
    """
    pickles = sorted(f.name for f in files if f.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{path}: weights in {', '.join(pickles[:3])} are Python pickles, which can run code when they are loaded; "
            "deepinfer reads safetensors and GGUF only. Convert it with the model's own tools "
            "(save_pretrained writes safetensors) and try again"
        )


def refuse_foreign_config(path: Path, section: Mapping[str, Any]) -> None:
    """Refuse a quantization section that is not ours.

    Args:
        path: The file that holds it.
        section: ``quantization_config`` of config.json, or the whole of a ``quantize_config.json``.

    Raises:
        CheckpointError: Naming the method and, where given, the bits.
    """
    method = section.get("quant_method")
    if method == QUANT_METHOD:
        return
    if method is None:
        method = "gptq" if "bits" in section or "w_bit" in section else None
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        method = "bitsandbytes"
    bits = section.get("bits", section.get("w_bit"))
    name = _FOREIGN_NAMES.get(str(method).lower(), repr(method))
    raise CheckpointError(
        f"{path}: the weights are quantized by {name}{f' with {bits} bits' if bits is not None else ''}, "
        f"which this release does not read; {_WHAT_WORKS}"
    )


def refuse_foreign_tensors(path: Path, names: Iterable[str]) -> None:
    """Refuse quantized tensors of another format that no config announced.

    Raises:
        CheckpointError: Naming the first such tensor and the format it belongs to.
    """
    for name in sorted(names):
        for pattern, method in _FOREIGN_TENSORS:
            if pattern.search(name):
                raise CheckpointError(
                    f"{path}: tensor {name} belongs to a model quantized by {method}, "
                    f"although no quantization_config says so; {_WHAT_WORKS}"
                )
