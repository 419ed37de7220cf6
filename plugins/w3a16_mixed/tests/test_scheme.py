from itertools import product

import pytest
import torch
from deepinfer_w3a16.scheme import W3A16

from deepinfer_core.errors import ConfigError

SCHEME = W3A16()


def bytes_of(codes: list[int]) -> list[int]:
    """Return the three bytes of eight codes by the text of the format, bit by bit."""
    q = [code & 7 for code in codes]
    b0 = q[0] | q[1] << 3 | (q[2] & 3) << 6
    b1 = q[2] >> 2 | q[3] << 1 | q[4] << 4 | (q[5] & 1) << 7
    b2 = q[5] >> 1 | q[6] << 2 | q[7] << 5
    return [b0, b1, b2]


def test_eight_codes_are_three_bytes_as_counted_by_hand() -> None:
    # 0..7, least significant bit first: 000 100 010 110 001 101 011 111 read as bits 0 to 23.
    assert SCHEME.pack(torch.arange(8).view(1, 8), zeros=True).tolist() == [[0x88, 0xC6, 0xFA]]
    assert SCHEME.pack(torch.tensor([[-4, 3, -1, 0, 1, -2, 2, -3]]), zeros=False).tolist() == [[0xDC, 0x11, 0xAB]]
    assert bytes_of([-4, 3, -1, 0, 1, -2, 2, -3]) == [0xDC, 0x11, 0xAB]
    assert SCHEME.pack(torch.tensor([[7] * 9]), zeros=True).tolist() == [[0xFF, 0xFF, 0xFF, 0x07, 0x00, 0x00]]


def test_a_row_of_32_is_the_contiguous_stream_of_other_packers_too() -> None:
    packed = SCHEME.pack((torch.arange(32) % 8).view(1, 32), zeros=True)
    words = [int.from_bytes(bytes(packed[0, i : i + 4].tolist()), "little") for i in (0, 4, 8)]
    assert words == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]
    for place, expected in ((10, [0xC0000000, 1, 0]), (21, [0, 0x80000000, 3])):
        row = torch.zeros(1, 32, dtype=torch.int8)
        row[0, place] = 7
        packed = SCHEME.pack(row, zeros=True)
        assert [int.from_bytes(bytes(packed[0, i : i + 4].tolist()), "little") for i in (0, 4, 8)] == expected


@pytest.mark.parametrize("seed", range(3))
def test_random_codes_follow_the_text_of_the_format(seed: int) -> None:
    codes = torch.randint(0, 8, (5, 24), generator=torch.Generator().manual_seed(seed))
    expected = [[b for i in (0, 8, 16) for b in bytes_of(row[i : i + 8])] for row in codes.tolist()]
    assert SCHEME.pack(codes, zeros=True).tolist() == expected


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("k", [1, 7, 8, 9, 31, 32, 33])
def test_every_code_survives_in_every_place(zeros: bool, k: int) -> None:
    lo, hi = (0, 7) if zeros else (-4, 3)
    base = lo if zeros else 0
    rows = [[code if i == place else base for i in range(k)] for code, place in product(range(lo, hi + 1), range(k))]
    codes = torch.tensor(rows, dtype=torch.int8)
    packed = SCHEME.pack(codes, zeros=zeros)
    assert packed.dtype == torch.uint8
    assert packed.shape == (codes.shape[0], 3 * -(-k // 8))
    assert torch.equal(SCHEME.unpack(packed, k, zeros=zeros), codes)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_codes_behind_k_mean_nothing(zeros: bool) -> None:
    codes = torch.tensor([[3, 1, 2]])
    packed = SCHEME.pack(codes, zeros=zeros)
    packed[:, 1] |= 0xFE
    packed[:, 2] |= 0xFF
    assert SCHEME.unpack(packed, 3, zeros=zeros).tolist() == codes.tolist()


def test_a_fractional_zero_is_kept_as_it_is() -> None:
    tensors = {
        "packed": SCHEME.pack(torch.tensor([[0, 4, 7]]), zeros=True),
        "scales": torch.tensor([[0.5]]).half(),
        "zeros": torch.tensor([[3.25]]).half(),
    }
    assert SCHEME.dequantize(tensors, k=3, group_size=32).tolist() == [[-1.625, 0.375, 1.875]]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "group", "groups"), [(160, 128, 2), (4336, 32, 136), (128, -1, 1), (37, 32, 2)])
def test_shapes_of_the_canonical_tensors(zeros: bool, k: int, group: int, groups: int) -> None:
    weight = torch.randn(6, k, generator=torch.Generator().manual_seed(0))
    tensors = SCHEME.quantize(weight, group_size=group, zeros=zeros, method="rtn")
    assert set(tensors) == {"packed", "scales"} | ({"zeros"} if zeros else set())
    assert tensors["packed"].shape == (6, 3 * -(-k // 8))
    assert tensors["scales"].shape == (6, groups)
    found = SCHEME.dequantize(tensors, k=k, group_size=group)
    assert float((found - weight).norm() / weight.norm()) < 0.45


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
