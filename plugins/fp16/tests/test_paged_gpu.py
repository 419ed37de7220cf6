"""The paged backend on a card against attention in float32, and its launches in graphs."""

import math

import pytest
import torch
from deepinfer_fp16.kv_int8 import quantize_heads
from deepinfer_fp16.paged import PagedAttention

from deepinfer_core.layers.rope import RopeSpec
from deepinfer_core.layers.rotary import Rotary
from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem, HeadNorm

pytestmark = pytest.mark.gpu
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.2e-2}


def problem(heads=8, kv_heads=2, head_dim=64, window=None, page=16, act="float16", kv=None, **more):
    return AttentionProblem(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_windows=(window,),
        page_size=page,
        act_dtype=act,
        kv_dtype=kv or act,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        **more,
    )


class Requests:
    """Random contexts in scattered pages, and what attention over them is in float64."""

    def __init__(self, p, lens, seed=0, poison=True):
        self.p, self.lens, self.backend = p, lens, PagedAttention(p)
        torch.manual_seed(seed)
        self.dtype = getattr(torch, p.act_dtype)
        held = [-(-n // p.page_size) for n in lens]
        order = (torch.randperm(sum(held)) + 1).tolist()
        self.pages = [[order.pop() for _ in range(n)] for n in held]
        fill = math.nan if poison else 0
        self.kv = {}
        for name, (shape, dtype) in self.backend.kv_tensors(sum(held) + 2).items():
            kind = getattr(torch, dtype)
            self.kv[name] = torch.full(shape, 77 if kind == torch.int8 else fill, dtype=kind, device="cuda")
        shape = (p.heads + 2 * p.kv_heads, p.head_dim)
        self.qkv = [torch.randn(n, *shape, device="cuda").to(self.dtype) for n in lens]

    def batch(self, queries, lens=None, width=None, bound=None):
        lens, size = lens or self.lens, self.p.page_size
        positions = [torch.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]
        tables = [
            torch.tensor(pages + [0] * ((width or max(map(len, self.pages))) - len(pages))) for pages in self.pages
        ]
        slots = [table[at // size] * size + at % size for table, at in zip(tables, positions, strict=True)]
        more = {} if bound is None else {"max_kv_len": bound}
        return AttentionBatch(
            query_lens=tuple(queries),
            kv_lens=tuple(lens),
            page_table=torch.stack(tables).int().cuda(),
            page_ids=tuple(tuple(pages) for pages in self.pages),
            positions=torch.cat(positions).cuda(),
            slots=torch.cat(slots).cuda(),
            **more,
        )

    def rows(self, queries, lens=None):
        return torch.cat([x[n - q : n] for x, q, n in zip(self.qkv, queries, lens or self.lens, strict=True)])

    def write(self, queries, lens=None):
        qkv = self.rows(queries, lens)
        meta = self.backend.plan_step(self.batch(queries, lens))
        _, k, v = qkv.split((self.p.heads, self.p.kv_heads, self.p.kv_heads), dim=1)
        self.backend.write_kv(0, self.kv, k, v, meta)

    def run(self, queries, lens=None, **more):
        q = self.rows(queries, lens)[:, : self.p.heads]  # strided
        out = torch.full(q.shape, math.nan, dtype=self.dtype, device="cuda")
        self.backend.run(0, q, self.kv, self.backend.plan_step(self.batch(queries, lens, **more)), out)
        return out

    def right(self, queries, lens=None):
        p, outs, group = self.p, [], self.p.heads // self.p.kv_heads
        for x, n, m in zip(self.qkv, queries, lens or self.lens, strict=True):
            q, k, v = x[:m].float().split((p.heads, p.kv_heads, p.kv_heads), dim=1)
            q, k, v = q[m - n :].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            scores = q.double() @ k.double().repeat_interleave(group, 0).mT * p.scale
            at, key = torch.arange(m - n, m, device="cuda")[:, None], torch.arange(m, device="cuda")
            seen = key <= at
            if p.sliding_windows[0]:
                seen = seen & (key > at - p.sliding_windows[0])
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            outs.append((weights @ v.double().repeat_interleave(group, 0)).transpose(0, 1))
        return torch.cat(outs).float()


def check(found, right, p):
    assert torch.isfinite(found).all()
    limit = 2e-2 if p.kv_dtype == "int8" else TOLERANCE[p.act_dtype]
    error = ((found.float() - right).norm() / right.norm()).item()
    assert error < limit, error


HEADS = [(4, 2), (9, 3), (14, 2), (28, 4), (8, 8), (32, 2), (20, 1)]
KV = [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "int8"), ("bfloat16", "int8")]
LENS = [1, 15, 16, 17, 64, 65, 200, 1000]


@pytest.mark.parametrize(("act", "kv"), KV)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_and_chunks_follow_the_definition(heads, kv_heads, head_dim, act, kv):
    p = problem(heads, kv_heads, head_dim, act=act, kv=kv)
    r = Requests(p, LENS)
    r.write(LENS)
    ones = [1] * len(LENS)
    check(r.run(ones), r.right(ones), p)
    queries = [1, 14, 1, 17, 63, 1, 97, 130]
    check(r.run(queries), r.right(queries), p)


@pytest.mark.parametrize(("act", "kv"), KV[::2])
@pytest.mark.parametrize("page", [16, 32, 48])
@pytest.mark.parametrize("window", [1, 7, 64, 100, 5000])
def test_windows_and_pages(window, page, act, kv):
    p = problem(window=window, page=page, act=act, kv=kv, head_dim=128)
    r = Requests(p, LENS)
    r.write(LENS)
    for queries in ([1] * len(LENS), [1, 15, 3, 17, 2, 1, 90, 400]):
        check(r.run(queries), r.right(queries), p)


@pytest.mark.parametrize("queries", [*range(1, 20), 31, 32, 33, 63, 64, 65, 96, 97])
def test_every_chunk_edge(queries):
    p = problem(9, 3)
    r = Requests(p, [queries, queries + 37])
    r.write(r.lens)
    check(r.run([queries, queries]), r.right([queries, queries]), p)


def test_keys_that_a_window_has_left_behind_are_not_read():
    p = problem(window=20)
    r = Requests(p, [300])
    r.write([49])  # positions 251..299; all before are NaN
    check(r.run([1]), r.right([1]), p)
    check(r.run([30]), r.right([30]), p)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_query_heads_read_the_kv_head_of_their_group(heads, kv_heads, kv):
    p = problem(heads, kv_heads, kv=kv)
    r = Requests(p, [70, 70])
    for x in r.qkv:
        x[:, heads + kv_heads :] = torch.arange(kv_heads, device="cuda")[:, None]
    r.write([70, 70])
    right = (torch.arange(heads, device="cuda") // (heads // kv_heads)).float()[:, None].expand(heads, 64)
    for queries in ([1, 1], [70, 1], [33, 40]):
        out = r.run(queries).float()
        torch.testing.assert_close(out, right.expand_as(out), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_the_same_launch_gives_the_same_bits(kv):
    r = Requests(problem(16, 2, 128, kv=kv), [4000, 3001, 77, 900])
    r.write(r.lens)
    for queries in ([1, 1, 1, 1], [1, 300, 1, 64]):
        first = r.run(queries)
        check(first, r.right(queries), r.p)
        for _ in range(20):
            assert torch.equal(r.run(queries), first)
    assert torch.equal(r.run([1] * 4, bound=4096), r.run([1] * 4))  # the bound changes the grid, not the cuts


def test_batch_invariant_cuts_do_not_depend_on_the_batch():
    r = Requests(problem(16, 2, 128, batch_invariant=True), [1500, 333, 77, 900])
    r.write(r.lens)
    together = r.run([1, 1, 1, 1])
    check(together, r.right([1] * 4), r.p)
    for i in range(4):
        alone = Requests(r.p, [r.lens[i]])
        alone.kv, alone.pages, alone.qkv = r.kv, [r.pages[i]], [r.qkv[i]]
        assert torch.equal(alone.run([1])[0], together[i])


def test_empty_contexts_and_slots_of_nowhere():
    r = Requests(problem(), [40, 16])
    r.write([40, 16])
    before = {name: t.clone() for name, t in r.kv.items()}
    batch = r.batch([1, 1])
    batch.lens[1] = 0
    batch.slots[:] = -1
    meta = r.backend.plan_step(batch)
    rows = r.rows([1, 1])
    r.backend.write_kv(0, r.kv, rows[:, 8:10], rows[:, 10:], meta)
    for name, t in r.kv.items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8))
    out = torch.full((2, 8, 64), math.nan, dtype=torch.float16, device="cuda")
    r.backend.run(0, rows[:, :8], r.kv, meta, out)
    assert not out[1].any()
    check(out[:1], r.right([1, 1])[:1], r.p)


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_a_graph_follows_its_tensors(kv):
    r = Requests(problem(kv=kv), [700, 90, 33], poison=False)
    r.write(r.lens)
    for captured, replays in (
        ([1, 1, 1], [([1, 1, 1], [700, 90, 33]), ([1, 1, 1], [64, 65, 1])]),
        ([60, 1, 1], [([60, 1, 1], [700, 90, 33]), ([1, 30, 31], [650, 90, 33]), ([40, 21, 1], [300, 70, 9])]),
    ):
        batch = r.batch(captured, bound=1024)
        q = r.rows(captured)[:, :8].contiguous()
        out = torch.empty_like(q)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            r.backend.run(0, q, r.kv, r.backend.plan_step(batch), out)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                r.backend.run(0, q, r.kv, r.backend.plan_step(batch), out)
        for queries, lens in replays:
            fresh = r.batch(queries, lens)
            batch.lens.copy_(fresh.lens)
            batch.query_starts.copy_(fresh.query_starts)
            q.copy_(r.rows(queries, lens)[:, :8])
            out.fill_(math.nan)
            graph.replay()
            check(out, r.right(queries, lens), r.p)
            assert torch.equal(out, r.run(queries, lens, bound=1024))


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_offsets_beyond_32_bits_read_the_same(kv):
    p = problem(8, 8, 128, kv=kv)
    r = Requests(p, [40])
    shapes = r.backend.kv_tensors(131_080)
    r.kv = {n: torch.empty(shape, dtype=getattr(torch, d), device="cuda") for n, (shape, d) in shapes.items()}
    outs = []
    for pages in ([1, 2, 3], [131_073, 131_074, 131_075], [131_079, 131_073, 131_076]):
        r.pages = [pages]
        r.write([40])
        outs.append(torch.cat((r.run([1]), r.run([40]))))
    check(outs[0][:1], r.right([1]), p)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    "rows",
    [
        torch.cat((torch.tensor([100.0]), torch.full((63,), 0.01))).expand(1, 2, 64),
        torch.zeros(1, 2, 64),
        torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)) * 4,
        torch.full((1, 2, 64), 65_504.0),
        torch.full((1, 2, 64), 6e-8),
    ],
    ids=["outlier", "zero", "normal", "largest half", "smallest half"],
)
def test_int8_stores_what_the_reference_quantizer_gives(rows):
    n = len(rows)
    r = Requests(problem(kv="int8"), [n])
    k = rows.half().cuda()
    r.backend.write_kv(0, r.kv, k, -k, r.backend.plan_step(r.batch([n])))
    codes, scales = quantize_heads(k)
    slots = r.batch([n]).slots
    for name, sign in (("k", 1), ("v", -1)):
        stored = r.kv[name].transpose(1, 2).reshape(-1, 2, 64)[slots]
        assert torch.equal(stored, codes * sign)
        assert torch.equal(r.kv[f"{name}_scale"].transpose(1, 2).reshape(-1, 2)[slots], scales)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("act", ["float16", "bfloat16"])
def test_one_launch_norms_rotates_and_stores(act, head_dim, norm):
    p = problem(9, 3, head_dim, act=act)
    r = Requests(p, [45])
    batch, qkv = r.batch([45]), r.qkv[0].clone()
    rotary = Rotary(RopeSpec(), head_dim, 64, device="cuda", dtype=r.dtype)
    cos_sin = rotary.at(batch.positions, 45)
    weight = (torch.rand(12, head_dim, device="cuda") + 0.5).to(r.dtype)
    r.backend.rotate_and_write(
        0, r.kv, qkv, cos_sin, r.backend.plan_step(batch), HeadNorm(weight=weight, eps=1e-6) if norm else None
    )
    right = r.qkv[0][:, :12].float()
    if norm:
        right = right / (right.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()
    rotary.rotate_(right, tuple(t.float() for t in cos_sin))
    limit = 1e-3 if act == "float16" else 8e-3
    torch.testing.assert_close(qkv[:, :9].float(), right[:, :9], rtol=limit, atol=limit)
    for name, values in (("k", right[:, 9:]), ("v", r.qkv[0][:, 12:].float())):
        stored = r.kv[name].transpose(1, 2).reshape(-1, 3, head_dim)[batch.slots].float()
        torch.testing.assert_close(stored, values, rtol=limit, atol=limit)
