from collections.abc import Iterator

import pytest
import torch

from deepinfer_core.kernels.accumulation import keep_float32_sums
from deepinfer_core.kernels.fallback import DequantizeMatmul
from deepinfer_core.plugin_api import LinearProblem


@pytest.fixture(autouse=True)
def torch_s_own_switches() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul  # no plain attributes: monkeypatch cannot put them back
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True
    yield
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def switches() -> set[bool]:
    matmul = torch.backends.cuda.matmul
    return {
        bool(matmul.allow_fp16_reduced_precision_reduction),
        bool(matmul.allow_bf16_reduced_precision_reduction),
    }


def test_torch_is_told_to_keep_float32_sums() -> None:
    keep_float32_sums()
    assert switches() == {False}


@pytest.mark.parametrize(("device", "expected"), [("cuda", {False}), ("cpu", {True})])
def test_kernels_on_a_card_say_so_when_they_are_made(device: str, expected: set[bool]) -> None:
    problem = LinearProblem(n=4, k=4, m_max=1, device=device, capability=(9, 0), scheme="any")  # type: ignore[arg-type]
    DequantizeMatmul(problem, object())  # type: ignore[arg-type]
    assert switches() == expected
