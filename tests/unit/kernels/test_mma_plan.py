"""Plans of the tensor-core kernels: every record is covered once, and nothing exceeds a card or the workspace."""

import itertools

import pytest

from deepinfer_core.kernels.mma_plan import SHARED_LIMIT, TICKET_BYTES, Shape, best_plan, stream_plan, tile_plan

SHAPES = [(1, 1), (17, 130), (200, 1000), (2048, 2048), (3584, 18944), (37888, 3584), (151936, 2048), (64, 65536)]
ROWS = (1, 3, 8, 9, 16, 17, 24, 33, 64, 65, 128, 512)


def shapes():
    cards = [((8, 6), 16), ((8, 0), 108), ((9, 0), 132), ((12, 0), 170), ((9, 9), 1)]
    for (n, k), (capability, sms), bits, (group, zeros) in itertools.product(
        SHAPES, cards, (3, 4), ((128, False), (32, True), (-1, True))
    ):
        limit = SHARED_LIMIT.get(capability, min(SHARED_LIMIT.values()))
        yield Shape(bits=bits, n=n, k=k, group_size=group, zeros=zeros, bf16=zeros, sms=sms, shared_limit=limit)


@pytest.mark.parametrize("m", ROWS)
def test_stream_plans_cover_every_record_and_fit(m):
    for shape in shapes():
        plan = stream_plan(shape, m)
        macros = dict(plan.defines)
        columns, slices, chunks = plan.grid
        per_block, slice_units = plan.cut
        groups = -(-shape.tiles // macros["FT"])
        assert (columns - 1) * per_block < groups <= columns * per_block
        assert (slices - 1) * slice_units < shape.units <= slices * slice_units
        assert (chunks - 1) * 8 * macros["NT"] < m <= chunks * 8 * macros["NT"]
        assert plan.shared_bytes + 1024 <= shape.shared_limit
        assert columns * chunks * 4 <= TICKET_BYTES
        part = per_block * 16 * macros["FT"] * 8 * macros["NT"] * 4
        assert plan.partial_bytes == (columns * slices * chunks * part if slices > 1 else 0)


@pytest.mark.parametrize("m", ROWS)
def test_tile_plans_cover_every_step_and_fit(m):
    for shape in shapes():
        plan = tile_plan(shape, m)
        macros = dict(plan.defines)
        steps, share = plan.cut
        blocks, _, chunks = plan.grid
        tiles = -(-shape.tiles // (macros["WARPS"] // macros["KW"] * macros["FT"]))
        assert (steps - 1) * macros["KW"] < shape.units <= steps * macros["KW"]
        assert (blocks - 1) * share < tiles * steps <= blocks * share
        assert (chunks - 1) * 8 * macros["NT"] < m <= chunks * 8 * macros["NT"]
        assert plan.shared_bytes + 1024 <= shape.shared_limit
        assert chunks * tiles * 4 <= TICKET_BYTES


def test_zeros_are_streamed_and_few_rows_too():
    for shape, m in itertools.product(shapes(), ROWS):
        kind = best_plan(shape, m).kind
        assert kind == "mma_stream" if shape.zeros or m <= 8 else kind in ("mma_stream", "mma_tile")
