"""The sdpa backend against attention written out, over pages in any order."""

import math

import pytest
import torch
from deepinfer_fp16.kv_int8 import dequantize_heads, quantize_heads
from deepinfer_fp16.sdpa import SdpaAttention, element_offset

from deepinfer_core.errors import KernelError
from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem

PAGE = 4


def problem(heads=4, kv_heads=2, head_dim=8, windows=(None,), act="float32", kv=None, page_size=PAGE):
    return AttentionProblem(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_windows=windows,
        page_size=page_size,
        act_dtype=act,
        kv_dtype=kv or act,
        device="cpu",
    )


def batch(query_lens, kv_lens, pages, page_size=PAGE):
    """A step over requests whose pages are given in order."""
    positions, slots = [], []
    for queries, context, held in zip(query_lens, kv_lens, pages, strict=True):
        for position in range(context - queries, context):
            positions.append(position)
            slots.append(held[position // page_size] * page_size + position % page_size)
    width = max(map(len, pages))
    return AttentionBatch(
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        page_table=torch.tensor([[*held, *[0] * (width - len(held))] for held in pages], dtype=torch.int32),
        page_ids=tuple(tuple(held[: -(-context // page_size)]) for held, context in zip(pages, kv_lens, strict=True)),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots, dtype=torch.int64),
    )


def cache(backend, pages, fill=0):
    return {
        name: torch.full(shape, fill, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in backend.kv_tensors(pages).items()
    }


def step(backend, kv, described, q, k, v, layer=0):
    meta = backend.plan_step(described)
    backend.write_kv(layer, kv, k, v, meta)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    backend.run(layer, q, kv, meta, out)
    return out


def expected(q, k, v, scale, window=None):
    """Causal attention of the last ``len(q)`` tokens of a context, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    first = k.shape[0] - q.shape[0]
    for i in range(q.shape[0]):
        last = first + i
        start = 0 if window is None else max(0, last - window + 1)
        for h in range(q.shape[1]):
            keys, values = k[start : last + 1, h // group], v[start : last + 1, h // group]
            out[i, h] = torch.softmax(keys @ q[i, h] * scale, dim=0) @ values
    return out


def random_qkv(tokens, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, p.act_dtype)
    q = torch.randn(tokens, p.heads, p.head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, tokens, p.kv_heads, p.head_dim, generator=generator).to(dtype)
    return q, k, v


CONSECUTIVE = (3, 4, 5, 6, 7)
SCATTERED = (9, 2, 7, 0, 5)


@pytest.mark.parametrize("pages", [CONSECUTIVE, SCATTERED], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 64])
@pytest.mark.parametrize("chunks", [(19,), (7, 12), (1,) * 19, (8, 8, 1, 1, 1), (4, 15)])
def test_any_chunking_equals_attention_over_the_whole(chunks, window, pages):
    p = problem(windows=(window,))
    backend = SdpaAttention(p)
    kv = cache(backend, 10)
    q, k, v = random_qkv(19, p)
    outs, done = [], 0
    for chunk in chunks:
        rows = slice(done, done + chunk)
        done += chunk
        outs.append(step(backend, kv, batch([chunk], [done], [pages]), q[rows], k[rows], v[rows]))
    torch.testing.assert_close(torch.cat(outs).double(), expected(q, k, v, p.scale, window), rtol=1e-5, atol=1e-6)


def test_a_request_has_the_same_bits_alone_and_in_a_mixed_batch():
    p = problem(windows=(None, 5))
    backend = SdpaAttention(p)
    alone, mixed = cache(backend, 12), cache(backend, 12)
    pages = [(2, 3), (7, 1, 4), (9, 10)]
    history = [random_qkv(n, p, seed=n) for n in (3, 5, 0)]
    fresh = [random_qkv(n, p, seed=10 + n) for n in (1, 4, 6)]
    for kv in (alone, mixed):
        for (q, k, v), held in zip(history, pages, strict=True):
            if len(q):
                step(backend, kv, batch([len(q)], [len(q)], [held]), q, k, v)
    lens = [(len(f[0]), len(h[0]) + len(f[0])) for f, h in zip(fresh, history, strict=True)]
    for layer in (0, 1):
        together = step(
            backend,
            mixed,
            batch([q for q, _ in lens], [c for _, c in lens], pages),
            *(torch.cat(parts) for parts in zip(*fresh, strict=True)),
            layer=layer,
        )
        single = [
            step(backend, alone, batch([n], [context], [held]), *f, layer=layer)
            for f, (n, context), held in zip(fresh, lens, pages, strict=True)
        ]
        assert torch.equal(together, torch.cat(single))


def test_layers_have_their_own_windows():
    p = problem(windows=(None, 2))
    backend = SdpaAttention(p)
    q, k, v = random_qkv(9, p)
    described = batch([9], [9], [(0, 1, 2)])
    for layer, window in enumerate(p.sliding_windows):
        out = step(backend, cache(backend, 3), described, q, k, v, layer=layer)
        torch.testing.assert_close(out.double(), expected(q, k, v, p.scale, window), rtol=1e-5, atol=1e-6)


def test_keys_that_a_window_has_left_behind_are_not_read():
    p = problem(windows=(3,))
    backend = SdpaAttention(p)
    kv = cache(backend, 4, fill=math.nan)
    q, k, v = random_qkv(5, p)
    kv["k"].view(-1, 2, 8)[8:12], kv["v"].view(-1, 2, 8)[8:12] = k[:4], v[:4]
    out = step(backend, kv, batch([1], [13], [(0, 1, 2, 3)]), q[4:], k[4:], v[4:])
    torch.testing.assert_close(out.double(), expected(q[4:], k[2:], v[2:], p.scale), rtol=1e-5, atol=1e-6)


def test_what_lies_behind_the_context_in_the_last_page_is_not_read():
    p = problem()
    backend = SdpaAttention(p)
    q, k, v = random_qkv(5, p)
    out = step(backend, cache(backend, 3, fill=math.nan), batch([5], [5], [(2, 0)]), q, k, v)
    assert torch.isfinite(out).all()


HEADS = [(4, 2), (9, 3), (14, 2), (28, 4), (8, 8)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("pages", [(1, 2), (2, 0)], ids=["consecutive", "scattered"])
def test_query_heads_read_the_kv_head_of_their_group(heads, kv_heads, kv_dtype, pages):
    p = problem(heads=heads, kv_heads=kv_heads, kv=kv_dtype)
    backend = SdpaAttention(p)
    kv = cache(backend, 3)
    q, k, _ = random_qkv(7, p)
    v = torch.arange(kv_heads, dtype=torch.float32)[None, :, None].expand(7, kv_heads, 8)
    right = (torch.arange(heads) // (heads // kv_heads)).float()[:, None].expand(heads, 8)
    prefill = step(backend, kv, batch([5], [5], [pages]), q[:5], k[:5], v[:5])
    chunk = step(backend, kv, batch([2], [7], [pages]), q[5:], k[5:], v[5:])
    decode = step(backend, kv, batch([1], [7], [pages]), q[6:], k[6:], v[6:])
    for out in (prefill, chunk, decode):
        torch.testing.assert_close(out, right.expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("act", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_every_dtype_is_served_and_kept(act, tolerance):
    p = problem(act=act)
    backend = SdpaAttention(p)
    q, k, v = random_qkv(6, p)
    out = step(backend, cache(backend, 2), batch([6], [6], [(0, 1)]), q, k, v)
    assert out.dtype == getattr(torch, act)
    torch.testing.assert_close(out.double(), expected(q, k, v, p.scale), rtol=tolerance, atol=tolerance)


def test_strided_queries_keys_and_values_are_read_as_they_are():
    p = problem()
    backend = SdpaAttention(p)
    wide = torch.randn(6, 2 * (4 + 2 + 2), 8, generator=torch.Generator().manual_seed(1))[:, :8]
    q, k, v = wide[:, :4], wide[:, 4:6], wide[:, 6:]
    for queries in (1, 3):
        kv = cache(backend, 2)
        step(backend, kv, batch([6 - queries], [6 - queries], [(0, 1)]), *(t[: 6 - queries] for t in (q, k, v)))
        out = step(backend, kv, batch([queries], [6], [(0, 1)]), *(t[6 - queries :] for t in (q, k, v)))
        right = expected(q[6 - queries :], k, v, p.scale)
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(KernelError, match="5 heads do not divide among 2 kv heads"):
        SdpaAttention(problem(heads=5))


def test_a_copied_page_holds_the_same_in_every_tensor():
    for kv_dtype in ("float32", "int8"):
        backend = SdpaAttention(problem(kv=kv_dtype))
        kv = cache(backend, 3)
        _, k, v = random_qkv(4, problem())
        backend.write_kv(0, kv, k, v, backend.plan_step(batch([4], [4], [(1,)])))
        backend.copy_page(kv, 1, 2)
        for tensor in kv.values():
            assert tensor[2].any()
            assert torch.equal(tensor[1], tensor[2])
            assert not tensor[0].any()


def test_offsets_of_a_big_pool_do_not_wrap_at_32_bits():
    assert element_offset(131_073 * 16, kv_heads=8, head_dim=128) == 2_147_500_032


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_attention_is_the_same_beyond_32_bits_of_offset(kv_dtype):
    p = problem(heads=8, kv_heads=8, head_dim=128, kv=kv_dtype, page_size=16)
    backend = SdpaAttention(p)
    # Never touched, the pool costs no memory: 2 x 2.1 billion elements of addresses, a few pages of RAM.
    kv = {name: torch.empty(shape, dtype=getattr(torch, d)) for name, (shape, d) in backend.kv_tensors(131_080).items()}
    q, k, v = random_qkv(40, p)
    answers = []
    for pages in [(1, 2, 3), (131_073, 131_074, 131_075), (131_079, 131_073, 131_076)]:
        prefill = step(backend, kv, batch([39], [39], [pages], 16), q[:39], k[:39], v[:39])
        decode = step(backend, kv, batch([1], [40], [pages], 16), q[39:], k[39:], v[39:])
        answers.append(torch.cat((prefill, decode)))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert torch.isfinite(answers[0]).all()


class TestInt8:
    def test_a_zero_row_reads_zero(self):
        codes, scales = quantize_heads(torch.zeros(2, 3, 8))
        read = dequantize_heads(codes, scales, torch.float32)
        assert torch.equal(read, torch.zeros(2, 3, 8))

    @pytest.mark.parametrize(
        "rows",
        [
            torch.cat((torch.tensor([100.0]), torch.full((63,), 0.01))).expand(1, 1, 64),
            torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(0)) * 4,
            torch.full((1, 1, 64), 65_504.0),
            torch.full((1, 1, 64), 6e-8),
            torch.full((1, 1, 64), -3.0),
        ],
        ids=["outlier", "normal", "largest half", "smallest half", "negative"],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_the_error_is_at_most_a_254th_of_the_largest(self, rows, dtype):
        rows = rows.to(dtype)
        codes, scales = quantize_heads(rows)
        assert codes.dtype == torch.int8
        assert scales.shape == rows.shape[:-1]
        error = (dequantize_heads(codes, scales, torch.float32) - rows.float()).abs()
        limit = rows.float().abs().amax(-1, keepdim=True) / 254
        assert (error <= limit * 1.00001).all()

    def test_strided_rows_quantize_as_their_copy(self):
        wide = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(2))
        for view in (wide[:, 1:3], wide[2:3], wide.transpose(0, 1)):
            for got, right in zip(quantize_heads(view), quantize_heads(view.contiguous()), strict=True):
                assert torch.equal(got, right)

    def test_attention_is_close_to_the_unquantized(self):
        p = problem(head_dim=64, kv="int8")
        backend = SdpaAttention(p)
        q, k, v = random_qkv(30, p)
        out = step(backend, cache(backend, 8), batch([30], [30], [(0, 1, 2, 3, 4, 5, 7, 6)]), q, k, v)
        right = expected(q, k, v, p.scale)
        assert (out - right).abs().max() < 0.03
        assert (out - right).abs().mean() < 0.005
