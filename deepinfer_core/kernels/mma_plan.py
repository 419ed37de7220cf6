"""Which tensor-core kernel variant serves (M, N, K) and how its work is cut; plain integers, no torch."""

from __future__ import annotations

from attrs import frozen

from deepinfer_core.kernels.mma16 import FEATURES, UNIT, record_rows

SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}
"""Largest dynamic shared memory of a block; other cards get the smallest of these."""

TICKET_BYTES = 64 * 1024
"""Head of the workspace: arrival counters, zero before and after every launch."""

STREAM_ROWS = 16
"""Above, shared memory holds too few k of x: M = 30 of 37888 x 3584 took 47.6 us here and 40.9 in the tile kernel."""

_SPLIT_COST = 48
"""Records a block could stream in the 1.5 us that a sum over slices takes (3584 x 18944, M = 1, H200)."""


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
    """

    bits: int
    n: int
    k: int
    group_size: int
    zeros: bool
    bf16: bool
    sms: int
    shared_limit: int

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
        cut: What the kernel's arguments say about the cut: (tiles a block, records a slice) or (units a block,).
    """

    kind: str
    defines: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    partial_bytes: int
    cut: tuple[int, ...]


def stream_plan(shape: Shape, m: int) -> Plan:
    """Plan the kernel that keeps activations in shared memory; serves any M, in steps of up to 32 rows."""
    row_tiles = min(-(-m // 8), 4)
    # W3 in pairs of feature tiles: 17.0 us against 18.1 singly at 1 x 37888 x 3584; W4: 20.7 against 19.8.
    pair = 2 if shape.bits == 3 and row_tiles == 1 and shape.tiles >= 2 * shape.sms else 1
    warps = 16 if shape.shared_limit >= 160 * 1024 else 8
    depth = 3  # 4 and 6 are no faster at 16 warps a block, and cost 16 KB each
    blocks = 2 if row_tiles == 1 and pair == 1 and warps == 16 else 1
    best: tuple[float, int, int, int, int] | None = None
    tile_groups = -(-shape.tiles // pair)
    for slices in range(1, shape.units + 1):
        slice_units = -(-shape.units // slices)
        if -(-shape.units // slice_units) != slices:
            continue
        shared = _stream_shared(shape, row_tiles, pair, warps, depth, slice_units, min(m, 8 * row_tiles))
        if shared > shape.shared_limit - 1024:
            continue
        columns = max(1, shape.sms // slices)
        per_block = -(-tile_groups // columns)
        cost = per_block * slice_units + (0 if slices == 1 else _SPLIT_COST + 4 * slices)
        if best is None or cost < best[0]:
            best = (cost, slices, slice_units, per_block, shared)
        if slices > 32 and best is not None:
            break
    assert best is not None, "a slice of one record always fits"
    _, slices, slice_units, per_block, shared = best
    columns, chunks = -(-tile_groups // per_block), -(-m // (8 * row_tiles))
    partial = columns * slices * chunks * per_block * pair * FEATURES * row_tiles * 8 * 4 if slices > 1 else 0
    assert columns * chunks * 4 <= TICKET_BYTES
    return Plan(
        kind="mma_stream",
        defines=_defines(shape, NT=row_tiles, FT=pair, WARPS=warps, DEPTH=depth, MINB=blocks, EVICT=1),
        grid=(columns, slices, chunks),
        threads=warps * 32,
        shared_bytes=shared,
        partial_bytes=partial,
        cut=(per_block, slice_units),
    )


def tile_plan(shape: Shape, m: int) -> Plan:
    """Plan the stream-K kernel: M from about 17, symmetric codes."""
    row_tiles = min(-(-m // 8), 8)
    work = shape.tiles * shape.units
    # Measured on an H200 at M = 30: 2 tiles a warp 41.7 us at 37888 x 3584 and 28.0 at 3584 x 18944; 1 tile 9.2 and
    # 11.1 at 5632 x 2048 and 2048 x 5632 (2: from 10.7). 4 tiles: 40.9 on the first, but BF16 spills. At M = 64, 2
    # tiles: 71.6 and 42.0 on the two big ones.
    if work < 20_000:
        tiles, stages, blocks = 1, 3 if row_tiles > 4 else 4, 3
    else:
        tiles, stages, blocks = 2, 3, 3 if row_tiles <= 4 else 2
    shared = stages * row_tiles * 8 * 320
    if shape.shared_limit < 128 * 1024:  # one block of four warps would leave 8.6 idle; two must fit
        stages = 3 if row_tiles <= 5 else 2
        shared = stages * row_tiles * 8 * 320
        blocks = min(blocks, max(1, shape.shared_limit // (shared + 1024)))
    warps = 4
    chunks = -(-m // (8 * row_tiles))
    total = -(-shape.tiles // (warps * tiles)) * shape.units
    share = -(-total // max(1, min(total, shape.sms * blocks // min(chunks, blocks))))
    count = -(-total // share)
    assert chunks * (total // shape.units) * 4 <= TICKET_BYTES
    return Plan(
        kind="mma_tile",
        defines=_defines(shape, NT=row_tiles, FT=tiles, WARPS=warps, STAGES=stages, MINB=blocks),
        grid=(count, 1, chunks),
        threads=warps * 32,
        shared_bytes=shared,
        partial_bytes=chunks * count * 2 * tiles * row_tiles * warps * 32 * 16,
        cut=(share,),
    )


def _stream_shared(shape: Shape, row_tiles: int, pair: int, warps: int, depth: int, slice_units: int, rows: int) -> int:
    record = shape.bits * 256 + shape.group_rows * 32
    part = 16 * pair * (row_tiles * 8 + (0 if row_tiles % 2 else 8)) * 4
    ring = max(depth * pair * record, part)
    offsets = slice_units * shape.group_rows * row_tiles * 8 * 4
    return warps * (ring + part) + offsets + rows * (slice_units * 256 + 64)


def _defines(shape: Shape, **variant: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({**shape.defines(), **variant}.items()))
