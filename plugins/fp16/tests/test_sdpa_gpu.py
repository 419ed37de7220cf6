"""The sdpa backend on a card against the same backend on the CPU in float32."""

import pytest
import torch
from deepinfer_fp16.sdpa import SdpaAttention

from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem

pytestmark = pytest.mark.gpu

PAGES = 12
STEPS = [([37], [37]), ([20], [57]), ([1], [58]), ([5], [63])]


def answers(device, act, kv, window, heads, kv_heads, pages):
    problem = AttentionProblem(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        scale=0.125,
        sliding_windows=(window,),
        page_size=16,
        act_dtype=act,
        kv_dtype=kv,
        device=device,
    )
    backend, dtype = SdpaAttention(problem), getattr(torch, act)
    shapes = backend.kv_tensors(PAGES)
    cache = {n: torch.zeros(shape, dtype=getattr(torch, d), device=device) for n, (shape, d) in shapes.items()}
    generator, outs = torch.Generator().manual_seed(0), []
    for queries, contexts in STEPS:
        tokens, context = queries[0], contexts[0]
        positions = torch.arange(context - tokens, context)
        batch = AttentionBatch(
            query_lens=tuple(queries),
            kv_lens=tuple(contexts),
            page_table=torch.tensor([pages], dtype=torch.int32, device=device),
            page_ids=(tuple(pages[: -(-context // 16)]),),
            positions=positions.to(device),
            slots=(torch.tensor(pages)[positions // 16] * 16 + positions % 16).to(device),
        )
        qkv = torch.randn(tokens, heads + 2 * kv_heads, 64, generator=generator).to(device=device, dtype=dtype)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        meta = backend.plan_step(batch)
        backend.write_kv(0, cache, k, v, meta)
        out = torch.full(q.shape, torch.nan, device=device, dtype=dtype)
        backend.run(0, q, cache, meta, out)
        outs.append(out.cpu().float())
    return torch.cat(outs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (8, 8)])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("pages", [(2, 3, 4, 5), (9, 1, 7, 0)], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(
    ("act", "kv", "tolerance"),
    [
        ("float32", "float32", 2e-3),
        ("float16", "float16", 5e-3),
        ("bfloat16", "bfloat16", 4e-2),
        ("float16", "int8", 5e-2),
    ],
)
def test_the_card_agrees_with_the_cpu(act, kv, tolerance, pages, window, heads, kv_heads):
    found = answers("cuda", act, kv, window, heads, kv_heads, pages)
    right = answers("cpu", "float32", "float32", window, heads, kv_heads, pages)
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


def test_offsets_beyond_32_bits_read_the_same():
    problem = AttentionProblem(
        heads=8,
        kv_heads=8,
        head_dim=128,
        scale=0.125,
        sliding_windows=(None,),
        page_size=16,
        act_dtype="float16",
        kv_dtype="int8",
        device="cuda",
    )
    backend = SdpaAttention(problem)
    shapes = backend.kv_tensors(131_080)
    cache = {n: torch.empty(shape, dtype=getattr(torch, d), device="cuda") for n, (shape, d) in shapes.items()}
    q, k, v = torch.randn(3, 33, 8, 128, device="cuda").half()
    outs = []
    for pages in ((1, 2, 3), (131_073, 131_074, 131_075), (131_079, 131_073, 131_076)):
        at = torch.arange(33)
        batch = AttentionBatch(
            query_lens=(33,),
            kv_lens=(33,),
            page_table=torch.tensor([pages], dtype=torch.int32, device="cuda"),
            page_ids=(pages,),
            positions=at.cuda(),
            slots=(torch.tensor(pages)[at // 16] * 16 + at % 16).cuda(),
        )
        meta, out = backend.plan_step(batch), torch.empty_like(q)
        backend.write_kv(0, cache, k, v, meta)
        backend.run(0, q, cache, meta, out)
        outs.append(out)
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
