"""Sums of cuBLAS products stay in float32 to the end, whichever way it splits K."""

from __future__ import annotations

import torch


def keep_float32_sums() -> None:
    """Forbid cuBLAS to add the parts of a split K in float16 or bfloat16, which torch allows it by default.

    Parts of +114,688 and -114,688 would come out as NaN in float16 where their sum is 0. It is a switch of the whole
    process; torch has none for one product. Kernels that multiply 16-bit values call it when they are made.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
