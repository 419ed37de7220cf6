"""The paged kernels' resources on every target, and grids that follow from counts alone; no card needed."""

import pytest
import torch
from deepinfer_fp16.paged import CSRC, THREADS, PagedAttention, defines, head_tiles

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.nvrtc import CudaSource, compile_source
from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem, RotatingBackend
from deepinfer_core.testing.resources import CAPABILITIES, assert_resources


def problem(**changes):
    values = {
        "heads": 16,
        "kv_heads": 2,
        "head_dim": 128,
        "scale": 128**-0.5,
        "sliding_windows": (None,),
        "page_size": 16,
        "act_dtype": "float16",
        "kv_dtype": "float16",
        "device": "cuda",
        "capability": (9, 0),
    }
    return AttentionProblem(**(values | changes))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("act", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv", ["act", "int8"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_kernel_compiles_without_spills(head_dim, kv, act, capability):
    macros = defines(problem(head_dim=head_dim, act_dtype=act, kv_dtype=act if kv == "act" else kv))
    for entry, more in (
        ("paged_write", {}),
        ("paged_chunk", {}),
        ("paged_decode", {"NT": 1}),
        ("paged_decode", {"NT": 2}),
    ):
        compiled = compile_source(CudaSource.make(CSRC / f"{entry}.cu", macros | more, (CSRC,)), capability)
        assert_resources(compiled, entry, threads=THREADS, dynamic_shared=0, capability=capability)


def test_it_rotates_while_it_writes():
    assert isinstance(PagedAttention(problem()), RotatingBackend)


def test_head_groups_are_covered():
    assert [head_tiles(g) for g in (1, 7, 8, 9, 16, 17, 40)] == [(1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "a multiple of 16, asked for 8"),
        ({"kv_dtype": "bfloat16"}, "asked for bfloat16 under float16"),
        ({"kv_heads": 3}, "asked for 16 and 3"),
    ],
)
def test_what_it_cannot_serve_is_refused(changes, message):
    with pytest.raises(KernelError, match=message):
        PagedAttention(problem(**changes))


def batch(query_lens, kv_lens, **more):
    tokens = sum(query_lens)
    return AttentionBatch(
        query_lens=query_lens,
        kv_lens=kv_lens,
        page_table=torch.zeros(len(kv_lens), 256, dtype=torch.int32),
        page_ids=(),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slots=torch.zeros(tokens, dtype=torch.int64),
        **more,
    )


def test_grids_follow_from_counts_and_the_bound(monkeypatch):
    backend = PagedAttention(problem())
    backend._sms = 132
    long, short = (backend.plan_step(batch((1,) * 3, lens, max_kv_len=4096)) for lens in ((4096, 1, 9), (1, 1, 1)))
    assert (long.splits, long.tiles) == (short.splits, short.tiles)
    assert backend.splits(3, 4096) == backend.splits(4, 4096)  # a padded batch is cut as an unpadded one
    mixed = backend.plan_step(batch((1, 200, 1), (50, 300, 7)))
    assert mixed.splits
    assert mixed.tiles >= 4
    assert not backend.plan_step(batch((100, 200), (100, 200))).splits
    assert batch((1, 2), (5, 9)).query_starts.tolist() == [0, 1, 3]


def test_batch_invariant_splits_have_one_length():
    backend = PagedAttention(problem(batch_invariant=True))
    assert {backend.splits(n, 4096) for n in (1, 5, 64)} == {16}
    assert PagedAttention(problem(batch_invariant=True, max_model_len=131_072)).splits(1, 131_072) <= 64
