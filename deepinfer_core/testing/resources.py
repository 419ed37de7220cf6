"""What a compiled kernel may use of a multiprocessor: asserted for the first target card without having it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_core.kernels.nvrtc import Compiled
    from deepinfer_core.plugin_api import Capability

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
"""Every kernel must compile for these."""

SM86_REGISTERS, SM86_BLOCK_SHARED = 65_536, 99 * 1024
"""Registers of an SM and shared memory of a block on compute capability 8.6 (CUDA programming guide, tables)."""

TWO_BLOCKS_SHARED = 49 * 1024
"""Up to here two blocks share an SM's 100 KB, each with the 1 KB that the driver keeps."""

REGISTER_GRANULE = 8
"""Registers of a thread are granted in eights."""


def assert_resources(
    compiled: Compiled, entry: str, *, threads: int, dynamic_shared: int, capability: Capability
) -> None:
    """Check one kernel: no spills anywhere; on 8.6, two blocks an SM, or one of at least 8 warps if shared is large.

    Args:
        compiled: Result of `compile_source`.
        entry: The kernel's name.
        threads: Threads of a block.
        dynamic_shared: Dynamic shared memory of a block in bytes.
        capability: What it was compiled for.

    Raises:
        AssertionError: A bound does not hold; the text has the figures.
    """
    used = compiled.resources[entry]
    where = f"{entry} on sm_{capability[0]}{capability[1]}: {used}, {threads} threads, {dynamic_shared} B dynamic"
    assert used.spill_bytes == 0, f"spills: {where}"
    assert used.stack_bytes == 0, f"a stack frame (an array indexed at run time?): {where}"
    if capability != (8, 6):
        return
    shared = used.shared_bytes + dynamic_shared
    registers = -(-used.registers // REGISTER_GRANULE) * REGISTER_GRANULE * threads
    if shared <= TWO_BLOCKS_SHARED:
        assert 2 * registers <= SM86_REGISTERS, f"two blocks do not fit an SM's registers: {where}"
    else:
        assert shared <= SM86_BLOCK_SHARED, f"too much shared memory: {where}"
        assert registers <= SM86_REGISTERS, f"one block does not fit an SM's registers: {where}"
        assert threads >= 256, f"a block that owns the SM needs at least 8 warps: {where}"
