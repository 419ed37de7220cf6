"""Plans of the tensor-core kernels: every record is covered once, and nothing exceeds a card or the workspace."""

import itertools

import pytest

from deepinfer_core.kernels.mma_plan import (
    CLUSTERS,
    SHARED_LIMIT,
    TICKET_BYTES,
    Shape,
    best_plan,
    cluster_plan,
    stream_plan,
    tile_plan,
)

SHAPES = [(1, 1), (17, 130), (200, 1000), (2048, 2048), (3584, 18944), (37888, 3584), (151936, 2048), (64, 65536)]
ROWS = (1, 3, 8, 9, 16, 17, 24, 33, 64, 65, 128, 512)


def shapes():
    cards = [((8, 6), 16), ((8, 0), 108), ((9, 0), 132), ((12, 0), 170), ((9, 9), 1)]
    for (n, k), (capability, sms), bits, (group, zeros) in itertools.product(
        SHAPES, cards, (3, 4), ((128, False), (32, True), (-1, True))
    ):
        limit = SHARED_LIMIT.get(capability, min(SHARED_LIMIT.values()))
        yield Shape(bits=bits, n=n, k=k, group_size=group, zeros=zeros, bf16=zeros, sms=sms, shared_limit=limit)


@pytest.mark.parametrize("planner", [stream_plan, cluster_plan])
@pytest.mark.parametrize("m", ROWS)
def test_stream_plans_cover_every_record_and_fit(planner, m):
    for shape in shapes():
        plan = planner(shape, m)
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
        assert plan.cluster == macros["CLUSTER"] in (1, slices)
        assert plan.cluster == 1 or (planner is cluster_plan and plan.cluster in CLUSTERS)
        global_sums = slices > 1 and plan.cluster == 1
        assert plan.partial_bytes == (columns * slices * chunks * part if global_sums else 0)


def test_clusters_even_out_layers_with_few_long_features():
    shape = Shape(
        bits=4, n=3584, k=18944, group_size=128, zeros=False, bf16=False, sms=132, shared_limit=SHARED_LIMIT[9, 0]
    )
    plain, clustered = stream_plan(shape, 1), cluster_plan(shape, 1)
    assert plain.cluster == 1
    assert clustered.cluster == 4
    busiest = [per_block * slice_units for per_block, slice_units in (plain.cut, clustered.cut)]
    assert busiest == [296, 259]  # of 251 where every multiprocessor had the same


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


@pytest.mark.parametrize(("n", "k"), [(77, 4500), (200, 4500), (16, 8192)])
@pytest.mark.parametrize("m", [1, 20])
def test_the_layers_of_the_gpu_tests_are_cut_into_clusters(n, k, m):
    for bits, zeros, group in itertools.product((3, 4), (False, True), (32, 128)):
        shape = Shape(
            bits=bits, n=n, k=k, group_size=group, zeros=zeros, bf16=False, sms=132, shared_limit=SHARED_LIMIT[9, 0]
        )
        assert cluster_plan(shape, m).cluster > 1
