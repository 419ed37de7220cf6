import pytest
import torch
from attrs import evolve

from deepinfer_core.kernels.fallback import CHUNK_BYTES, DequantizeMatmul
from deepinfer_core.plugin_api import LinearProblem, Tensors


class CountingLayout:
    """A layout over plain values that remembers how much was decoded at once."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.largest = 0

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        self.largest = max(self.largest, out.nbytes)
        out.copy_(self.weight[n0:n1])


def problem(n: int, k: int, dtype: str) -> LinearProblem:
    return LinearProblem(n=n, k=k, m_max=64, device="cpu", act_dtype=dtype, scheme="any")


def bound(n: int, k: int, dtype: str) -> tuple[DequantizeMatmul, CountingLayout]:
    layout = CountingLayout(torch.randn(n, k, generator=torch.Generator().manual_seed(1)) / k**0.5)
    return DequantizeMatmul(problem(n, k, dtype), layout), layout  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_more_than_a_chunk_of_the_weights_exists_as_values(dtype: str) -> None:
    kernel, layout = bound(3000, 1024, dtype)
    x = torch.randn(2, 1024).to(getattr(torch, dtype))
    out = torch.full((2, 3000), float("nan"), dtype=x.dtype)
    kernel(x, {}, out)
    assert CHUNK_BYTES["cpu"] / 2 < layout.largest <= CHUNK_BYTES["cpu"] <= 32 << 20
    expected = x.double() @ layout.weight.double().t()
    assert torch.allclose(out.double(), expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-5)


def test_a_row_wider_than_a_chunk_is_decoded_alone() -> None:
    k = CHUNK_BYTES["cpu"] // 4 + 1
    kernel, layout = bound(2, k, "float32")
    out = torch.empty(1, 2)
    kernel(torch.ones(1, k), {}, out)
    assert layout.largest == 4 * k


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bias_and_residual_are_added_before_the_one_rounding(dtype: str) -> None:
    act = getattr(torch, dtype)
    step = torch.finfo(act).eps
    kernel, layout = bound(1, 1, dtype)
    layout.weight = torch.ones(1, 1)
    x, out = torch.ones(1, 1, dtype=act), torch.empty(1, 1, dtype=act)
    # 1 + step / 2 alone would round back to 1, and so would the residual behind it.
    half = torch.full((1,), step / 2, dtype=act)
    kernel(x, {}, out, bias=half, residual=half.view(1, 1))
    assert out.item() == 1 + step


def test_a_float16_product_beyond_its_range_may_come_back_through_the_residual() -> None:
    kernel, layout = bound(1, 2, "float16")
    layout.weight = torch.full((1, 2), 200.0)
    x, out = torch.full((1, 2), 200.0).half(), torch.empty(1, 1).half()
    kernel(x, {}, out, residual=torch.full((1, 1), -60000.0).half())
    assert out.item() == 20000


def test_no_rows_decode_nothing() -> None:
    kernel, layout = bound(8, 16, "float32")
    kernel(torch.empty(0, 16), {}, torch.empty(0, 8))
    assert layout.largest == 0


def test_chunks_on_a_card_are_in_the_activations_dtype_and_at_most_32_mib() -> None:
    on_card = evolve(problem(100_000, 4096, "float16"), device="cuda", capability=(8, 6))
    kernel = DequantizeMatmul(on_card, CountingLayout(torch.empty(0)))  # type: ignore[arg-type]
    assert kernel.rows * 4096 * kernel.value_dtype.itemsize <= 32 << 20
