from itertools import product

import pytest
import torch
from deepinfer_w4a16.scheme import W4A16

from deepinfer_core.errors import ConfigError

SCHEME = W4A16()


def test_the_even_k_is_the_low_nibble_as_counted_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 15, 0]])
    assert SCHEME.pack(codes, zeros=True).tolist() == [[0x21, 0xF3, 0x00]]
    signed = torch.tensor([[-8, 7, -1, 0, 3]])
    assert SCHEME.pack(signed, zeros=False).tolist() == [[0x78, 0x0F, 0x03]]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33])
def test_every_code_survives_in_every_place(zeros: bool, k: int) -> None:
    lo, hi = (0, 15) if zeros else (-8, 7)
    base = lo if zeros else 0
    rows = [[code if i == place else base for i in range(k)] for code, place in product(range(lo, hi + 1), range(k))]
    codes = torch.tensor(rows, dtype=torch.int8)
    packed = SCHEME.pack(codes, zeros=zeros)
    assert packed.dtype == torch.uint8
    assert packed.shape == (codes.shape[0], -(-k // 2))
    assert torch.equal(SCHEME.unpack(packed, k, zeros=zeros), codes)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_nibble_behind_an_odd_k_means_nothing(zeros: bool) -> None:
    codes = torch.tensor([[5, 1, 7]])
    packed = SCHEME.pack(codes, zeros=zeros)
    packed[:, 1] |= 0xF0
    assert SCHEME.unpack(packed, 3, zeros=zeros).tolist() == codes.tolist()


def test_a_fractional_zero_is_kept_as_it_is() -> None:
    tensors = {
        "packed": SCHEME.pack(torch.tensor([[0, 8, 15]]), zeros=True),
        "scales": torch.tensor([[0.5]]).half(),
        "zeros": torch.tensor([[7.25]]).half(),
    }
    assert SCHEME.dequantize(tensors, k=3, group_size=32).tolist() == [[-3.625, 0.375, 3.875]]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "group", "groups"), [(160, 128, 2), (4336, 32, 136), (128, -1, 1), (37, 32, 2)])
def test_shapes_of_the_canonical_tensors(zeros: bool, k: int, group: int, groups: int) -> None:
    weight = torch.randn(6, k, generator=torch.Generator().manual_seed(0))
    tensors = SCHEME.quantize(weight, group_size=group, zeros=zeros, method="rtn")
    assert set(tensors) == {"packed", "scales"} | ({"zeros"} if zeros else set())
    assert tensors["packed"].shape == (6, -(-k // 2))
    assert tensors["scales"].shape == (6, groups)
    found = SCHEME.dequantize(tensors, k=k, group_size=group)
    assert float((found - weight).norm() / weight.norm()) < 0.2


@pytest.mark.parametrize("zeros", [False, True])
def test_slices_are_what_the_whole_holds_there(zeros: bool) -> None:
    weight = torch.randn(10, 150, generator=torch.Generator().manual_seed(0))
    tensors = SCHEME.quantize(weight, group_size=32, zeros=zeros, method="rtn")
    whole = SCHEME.dequantize(tensors, k=150, group_size=32)
    rows = SCHEME.slice_n(tensors, 3, 7)
    assert torch.equal(SCHEME.dequantize(rows, k=150, group_size=32), whole[3:7])
    for k0, k1 in [(0, 64), (32, 96), (64, 150), (0, 150)]:
        part = SCHEME.slice_k(tensors, k0, k1, k=150, group_size=32)
        assert torch.equal(SCHEME.dequantize(part, k=k1 - k0, group_size=32), whole[:, k0:k1])


@pytest.mark.parametrize(("k0", "k1"), [(8, 64), (0, 40), (64, 64), (96, 32), (-32, 32), (0, 182)])
def test_a_slice_inside_a_group_or_outside_of_k_is_refused(k0: int, k1: int) -> None:
    tensors = SCHEME.quantize(torch.randn(2, 150), group_size=32, zeros=False, method="rtn")
    with pytest.raises(ValueError, match=r"inside a group|not a part"):
        SCHEME.slice_k(tensors, k0, k1, k=150, group_size=32)


@pytest.mark.parametrize("group", [0, 16, 48, 256, -2])
def test_other_groups_are_refused_before_any_work(group: int) -> None:
    with pytest.raises(ConfigError, match=f"groups of {group}; choose one of 32, 64, 128, -1"):
        SCHEME.quantize(torch.empty(0, 0), group_size=group, zeros=False)


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'gptq'; known: rtn, search"):
        SCHEME.quantize(torch.ones(1, 32), group_size=32, zeros=False, method="gptq")  # type: ignore[arg-type]
