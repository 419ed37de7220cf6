"""Which tensor-core kernel variant serves (M, N, K) and how its work is cut; plain integers, no torch."""

from __future__ import annotations

from attrs import evolve, frozen

from deepinfer_core.kernels.mma16 import FEATURES, UNIT, record_rows

# Figures in this file are of one H200, 2026-11-30; docs/kernels.md says how they were taken.

SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}
"""Largest dynamic shared memory of a block; other cards get the smallest of these."""

TICKET_BYTES = 256 * 1024
"""Head of the workspace: arrival counters, zero before and after every launch."""

STREAM_ROWS, STREAM_WORK = 16, 40_000
"""Up to 8 rows the stream kernel is ahead everywhere; up to 16 on layers of this many records, where it took 24.1 us
against 27.9 (37888 x 3584, M = 16); on smaller ones the tile kernel is (5632 x 2048: 5.2 against 6.9)."""

_SPLIT_COST = 48
"""Records a block could stream in the 1.5 us that a sum over slices takes (3584 x 18944, M = 1, H200)."""


_CLUSTER_COST = 24
"""The same for a sum through a cluster's shared memory: assumed, half of a sum through global memory."""

CLUSTERS = (2, 4)
"""Sizes of clusters: of 132 multiprocessors in groups of 16 and 18, clusters of these sizes leave few idle."""


@frozen(kw_only=True)
class Shape:
    """What a plan needs to know of a layer and a card.

    Attributes:
        bits: Bits of a code.
        n: Output features.
        k: Input features.
        group_size: 32, 64, 128 or -1.
        zeros: Groups store zeros.
        bf16: Activations are BF16.
        sms: Multiprocessors of the card.
        shared_limit: Dynamic shared memory that a block may have.
        clusters: Sums may meet in the shared memory of a cluster (9.0).
    """

    bits: int
    n: int
    k: int
    group_size: int
    zeros: bool
    bf16: bool
    sms: int
    shared_limit: int
    clusters: bool = False

    @property
    def tiles(self) -> int:
        """Feature tiles of 16."""
        return -(-self.n // FEATURES)

    @property
    def units(self) -> int:
        """Records along k."""
        return -(-self.k // UNIT)

    @property
    def group_rows(self) -> int:
        """Rows of 16 FP16 values a record has."""
        return record_rows(self.group_size, zeros=self.zeros)

    def defines(self) -> dict[str, int]:
        """Return the macros that follow from the layer."""
        group = UNIT if self.group_size == -1 else self.group_size
        return {"GROUP": group, "ZEROS": int(self.zeros), "BF16": int(self.bf16)}


@frozen(kw_only=True)
class Plan:
    """One launch.

    Attributes:
        kind: ``"mma_stream"`` or ``"mma_tile"``: the entry and the source's name.
        defines: Macros of the variant.
        grid: Blocks.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        partial_bytes: Workspace for FP32 sums, behind the tickets.
        cut: What the kernel's arguments say about the cut: (tiles a block, records a slice) or (steps a feature
            tile, steps a block).
        cluster: Blocks of a cluster along y; 1 for none.
    """

    kind: str
    defines: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    partial_bytes: int
    cut: tuple[int, int]
    cluster: int = 1


@frozen(kw_only=True)
class StreamCut:
    """How the stream kernel's work is laid out.

    Attributes:
        row_tiles: Row tiles of 8 a block.
        pair: Feature tiles of 16 a warp does at once, 1 or 2.
        warps: Warps of a block.
        depth: Records in a warp's ring.
        slices: Slices of k.
        cluster: The slices are the blocks of a cluster, whose sums meet in shared memory.
        resident: Blocks an SM that registers are kept for.
    """

    row_tiles: int
    pair: int
    warps: int
    depth: int
    slices: int = 1
    cluster: bool = False
    resident: int = 1

    def _tile_groups(self, shape: Shape) -> int:
        return -(-shape.tiles // self.pair)

    def per_block(self, shape: Shape) -> int:
        """Groups of ``pair`` feature tiles that a block takes."""
        return -(-self._tile_groups(shape) // max(1, shape.sms // self.slices))

    def slice_units(self, shape: Shape) -> int:
        """Records along k that a block takes."""
        return -(-shape.units // self.slices)

    def shared_bytes(self, shape: Shape, m: int) -> int:
        """Dynamic shared memory of a block."""
        record = shape.bits * 256 + shape.group_rows * 32
        rows, units = min(m, 8 * self.row_tiles), self.slice_units(shape)
        part = 16 * self.pair * (self.row_tiles * 8 + (0 if self.row_tiles % 2 else 8)) * 4
        ring = max(self.depth * self.pair * record, part)
        offsets = units * shape.group_rows * self.row_tiles * 8 * 4
        sums = self.per_block(shape) * self.pair * FEATURES * self.row_tiles * 8 * 4 if self.cluster else 0
        return self.warps * (ring + part) + offsets + sums + rows * (units * 256 + 64)

    def cost(self, shape: Shape) -> int:
        """Records that the busiest block streams, and what meeting costs, in records."""
        own = self.per_block(shape) * self.slice_units(shape)
        if self.slices == 1:
            return own
        return own + (_CLUSTER_COST if self.cluster else _SPLIT_COST + 4 * self.slices)

    def plan(self, shape: Shape, m: int) -> Plan:
        """Return the launch."""
        per_block, chunks = self.per_block(shape), -(-m // (8 * self.row_tiles))
        columns = -(-self._tile_groups(shape) // per_block)
        tile_bytes = self.pair * FEATURES * self.row_tiles * 8 * 4
        partial = 0 if self.cluster or self.slices == 1 else columns * self.slices * chunks * per_block * tile_bytes
        assert columns * chunks * 4 <= TICKET_BYTES
        cluster = self.slices if self.cluster else 1
        defines = _defines(
            shape,
            NT=self.row_tiles,
            FT=self.pair,
            WARPS=self.warps,
            DEPTH=self.depth,
            MINB=self.resident,
            EVICT=1,
            CLUSTER=cluster,
        )
        return Plan(
            kind="mma_stream",
            defines=defines,
            grid=(columns, self.slices, chunks),
            threads=self.warps * 32,
            shared_bytes=self.shared_bytes(shape, m),
            partial_bytes=partial,
            cut=(per_block, self.slice_units(shape)),
            cluster=cluster,
        )


def stream_plan(shape: Shape, m: int) -> Plan:
    """Plan the kernel that keeps activations in shared memory; serves any M, in steps of up to 32 rows."""
    row_tiles = min(-(-m // 8), 4)
    # Pairs of feature tiles share the activations a warp loads. M = 1, H200, in pairs and singly: W3 37888 x 3584 16.3
    # and 18.1 us; W4 22016 x 2048 8.1 and 8.4, but 37888 x 3584 at M = 8 21.1 and 20.6.
    top = 1 << 30 if shape.bits == 3 else 16 * shape.sms
    pair = 2 if row_tiles == 1 and 2 * shape.sms <= shape.tiles < top else 1
    # Many rows with many scales need more than the 128 registers of 16 warps: then 8 warps with deeper rings.
    heavy = row_tiles >= 3 and (shape.group_rows >= 4 or (shape.bf16 and shape.group_rows > 1))
    warps = 16 if shape.shared_limit >= 160 * 1024 and not heavy else 8
    depth = 5 if warps == 8 and row_tiles >= 3 else 3  # 4 and 6 are no faster at 16 warps, and cost 16 KB each
    best: StreamCut | None = None
    for slices in range(1, shape.units + 1):
        cut = StreamCut(row_tiles=row_tiles, pair=pair, warps=warps, depth=depth, slices=slices)
        if -(-shape.units // cut.slice_units(shape)) != slices:
            continue
        clustered = evolve(cut, cluster=True)
        for option in (cut, clustered) if shape.clusters and slices in CLUSTERS else (cut,):
            fits = option.shared_bytes(shape, m) <= shape.shared_limit - 1024
            if fits and (best is None or option.cost(shape) < best.cost(shape)):
                best = option
        if slices > 32 and best is not None:
            break
    assert best is not None, "a slice of one record always fits"
    # One block an SM where it is large: with two, a dependent launch's blocks double up on the first free SMs (22016 x
    # 2048, M = 1: 12.7 us, and 8.4 so).
    if warps == 8 and row_tiles <= 2 and best.shared_bytes(shape, m) <= 49 * 1024:
        best = evolve(best, resident=2)
    return best.plan(shape, m)


def cluster_plan(shape: Shape, m: int) -> Plan:
    """Plan the stream kernel where slices of k may also be a cluster's blocks; 9.0 only, by name until measured."""
    return stream_plan(evolve(shape, clusters=True), m)


def best_plan(shape: Shape, m: int) -> Plan:
    """Plan whichever kernel measured faster for this many rows."""
    few = m <= 8 or (m <= STREAM_ROWS and shape.tiles * shape.units >= STREAM_WORK)
    return stream_plan(shape, m) if few or shape.zeros else tile_plan(shape, m)


def tile_variant(shape: Shape, row_tiles: int) -> tuple[int, int, int, int, int]:
    """Return (feature tiles a warp, warps, warps a feature tile, stages, blocks an SM).

    Measured on an H200, launched dependent, M = 30, microseconds, beside one warp a feature tile: 37888 x 3584 40.6
    (41.7), 3584 x 18944 25.9 (27.5), 22016 x 2048 15.8 (18.6), 5632 x 2048 7.3 (8.5), 2048 x 2048 5.6 (6.0 with three
    warps), 3584 x 3584 9.8, 4608 x 3584 11.0, 2048 x 5632 9.8 (10.2). M = 16: 3584 x 18944 17.9. M = 64: 70.6, 41.1.
    """
    work = shape.tiles * shape.units
    tight = shape.bf16 or shape.group_rows > 1  # more constants or scales to hold: the larger variants would spill
    if shape.shared_limit < 128 * 1024:
        return 1, 4, 1, 3 if row_tiles <= 5 else 2, 2
    if work >= 20_000:
        if row_tiles <= 2:
            return 2, 8, 2, 3, 1 if tight else 2
        if row_tiles <= 4:
            return 2, 8 if tight else 12, 2, 3, 1
        return (1, 8, 2, 2, 1) if tight else (2, 4, 1, 3, 2)
    if row_tiles > 4:
        # 64 rows of four records in two stages are 201 KB
        return (1, 8, 2, 2, 1) if tight or shape.shared_limit < 224 * 1024 else (1, 12, 4, 2, 1)
    if 0.8 * shape.sms <= -(-shape.tiles // 3) <= shape.sms:  # three feature tiles a block and no tile shared
        return 1, 12, 4, 3, 1
    return 1, 16 if row_tiles <= 2 or not tight else 12, 4 if work <= 6_500 else 2, 3, 1


def tile_plan(shape: Shape, m: int) -> Plan:
    """Plan the stream-K kernel: M from about 9, symmetric codes."""
    row_tiles = min(-(-m // 8), 8)
    tiles, warps, per_tile, stages, blocks = tile_variant(shape, row_tiles)
    sum_warps = warps // per_tile
    shared = per_tile * stages * row_tiles * 8 * 320 + (per_tile - 1) * tiles * row_tiles * sum_warps * 512
    chunks = -(-m // (8 * row_tiles))
    steps = -(-shape.units // per_tile)
    block_tiles = -(-shape.tiles // (sum_warps * tiles))
    total = block_tiles * steps
    slots = max(1, shape.sms * blocks // min(chunks, blocks))
    # Nearly a tile a block: leave them whole. 115 blocks of 132 at 22016 x 2048 took 16.0 us, cut evenly 18.0.
    share = steps if 0.8 * slots <= block_tiles <= slots else -(-total // min(total, slots))
    count = -(-total // share)
    assert chunks * block_tiles * 4 <= TICKET_BYTES
    return Plan(
        kind="mma_tile",
        defines=_defines(shape, NT=row_tiles, FT=tiles, WARPS=warps, KW=per_tile, STAGES=stages, MINB=blocks),
        grid=(count, 1, chunks),
        threads=warps * 32,
        shared_bytes=shared,
        partial_bytes=chunks * count * 2 * tiles * row_tiles * sum_warps * 32 * 16,
        cut=(steps, share),
    )


def _defines(shape: Shape, **variant: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({**shape.defines(), **variant}.items()))
