"""Rotary frequencies and tables by hand-computed values."""

import pytest
import torch

from deepinfer_core.errors import CapacityError
from deepinfer_core.layers.rope import RopeSpec
from deepinfer_core.layers.rotary import Rotary, inverse_frequencies


def test_the_base_decides_the_frequencies():
    assert inverse_frequencies(RopeSpec(theta=1e6), 64)[16].item() == pytest.approx(0.001, rel=1e-6)
    assert inverse_frequencies(RopeSpec(theta=1e4), 64)[16].item() == pytest.approx(0.01, rel=1e-6)


def test_llama3_keeps_blends_and_stretches():
    rope = RopeSpec(
        type="llama3", theta=5e5, factor=32, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192
    )
    found = inverse_frequencies(rope, 64)
    right = {14: 0.00321145, 15: 0.00129055, 16: 0.000429557, 17: 9.70829e-5, 18: 1.94616e-5, 31: 9.41831e-8}
    for pair, value in right.items():
        assert found[pair].item() == pytest.approx(value, rel=1e-5), pair


def test_linear_divides_every_frequency():
    plain, slow = (inverse_frequencies(RopeSpec(type=t, factor=4.0), 16) for t in ("default", "linear"))
    torch.testing.assert_close(slow * 4, plain)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones():
    rope = RopeSpec(type="yarn", theta=1e4, factor=8.0, original_max_positions=2048)
    plain, found = inverse_frequencies(RopeSpec(), 128), inverse_frequencies(rope, 128)
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[-1] * 8, plain[-1])
    ratio = plain / found
    assert (ratio.diff() > -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def rotary(dtype=torch.float32, length=32, **values):
    return Rotary(RopeSpec(**values), 8, length, device="cpu", dtype=dtype)


def test_position_zero_changes_nothing():
    heads = torch.randn(1, 3, 8)
    table = rotary()
    torch.testing.assert_close(table.rotate_(heads.clone(), table.at(torch.tensor([0]), 1)), heads)


def test_pairs_half_a_head_apart_turn_by_their_angle():
    table = rotary()
    position = 5
    heads = torch.zeros(1, 1, 8)
    heads[0, 0, 1] = 1.0  # the first of pair 1, whose second is 1 + 8 / 2
    turned = table.rotate_(heads, table.at(torch.tensor([position]), position + 1))[0, 0]
    angle = position * 1e4 ** (-2 / 8)
    assert turned[1].item() == pytest.approx(torch.tensor(angle).cos().item(), abs=1e-6)
    assert turned[5].item() == pytest.approx(torch.tensor(angle).sin().item(), abs=1e-6)
    assert turned[[0, 2, 3, 4, 6, 7]].abs().max() == 0


def test_scores_depend_on_the_distance_alone():
    table = rotary(length=64)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at_q, at_k):
        turned = [table.rotate_(x.clone(), table.at(torch.tensor([p]), p + 1)) for x, p in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(60, 55), rtol=1e-4, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_the_attention_factor_scales_what_is_rotated():
    plain, scaled = rotary(), rotary(attention_factor=1.5)
    heads, where = torch.randn(1, 2, 8), torch.tensor([7])
    torch.testing.assert_close(
        scaled.rotate_(heads.clone(), scaled.at(where, 8)), 1.5 * plain.rotate_(heads.clone(), plain.at(where, 8))
    )


def test_strided_heads_are_rotated_in_place():
    table = rotary()
    wide = torch.randn(4, 5, 8)
    copy, where = wide.clone(), table.at(torch.arange(4), 4)
    table.rotate_(wide[:, :3], where)
    assert torch.equal(wide[:, 3:], copy[:, 3:])
    torch.testing.assert_close(wide[:, :3], table.rotate_(copy[:, :3].contiguous(), where))


def test_the_last_position_is_served_and_the_next_one_refused():
    table = rotary(length=32)
    table.at(torch.tensor([31]), 32)
    with pytest.raises(CapacityError, match=r"33 tokens is longer than the 32 positions.*max_model_len"):
        table.at(torch.tensor([32]), 33)


def test_half_precision_tables_are_rounded_once_from_float32():
    exact, half = rotary(length=4096), rotary(torch.bfloat16, length=4096)
    for right, found in zip(exact.at(torch.tensor([4095]), 4096), half.at(torch.tensor([4095]), 4096), strict=True):
        assert torch.equal(found, right.to(torch.bfloat16))
