"""Scratch memory: shared by the layers of a kernel, private to a kernel and to a stream."""

import pytest
import torch

from deepinfer_core.kernels.workspace import Workspaces


def test_layers_of_one_kernel_share_a_buffer_as_large_as_the_largest_wish():
    pool = Workspaces("cpu")
    pool.reserve("a", 10)
    pool.reserve("a", 30)
    pool.reserve("a", 20)
    first = pool.get("a")
    assert first.numel() == 30
    assert not first.any()
    assert pool.get("a") is first
    assert pool.nbytes == 30


def test_kernels_never_share_and_what_asked_for_nothing_gets_nothing():
    pool = Workspaces("cpu")
    pool.reserve("a", 8)
    pool.reserve("b", 8)
    assert pool.get("a").data_ptr() != pool.get("b").data_ptr()
    assert pool.get("c") is None


def test_a_later_larger_wish_is_met_with_zeroed_bytes():
    pool = Workspaces("cpu")
    pool.reserve("a", 8)
    pool.get("a").fill_(7)
    pool.reserve("a", 16)
    assert pool.get("a").numel() == 16
    assert not pool.get("a").any()


@pytest.mark.gpu
def test_each_stream_has_a_buffer_of_its_own():
    pool = Workspaces("cuda")
    pool.reserve("a", 64)
    mine = pool.get("a")
    with torch.cuda.stream(torch.cuda.Stream()):
        other = pool.get("a")
    assert mine.data_ptr() != other.data_ptr()
    assert pool.get("a") is mine
