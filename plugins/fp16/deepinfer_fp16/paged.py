"""Native attention over the paged KV cache: CUDA kernels for one query token a request and for chunks of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import field, frozen

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.struct_kernel import StructKernel
from deepinfer_core.kernels.workspace import Workspaces
from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem, HeadNorm

CSRC = Path(__file__).parent / "csrc"
THREADS = 128
WRITE_WARPS = 4
CHUNK_ROWS = 64
"""Query tokens of one block of the chunk kernel; ``ROWS`` there."""

MAX_SPLITS = 64
"""Most splits of one context; the array of factors in the decode kernel has so many places."""

DEFAULT_SPLITS = 32
"""Splits used at most: the last block adds them up alone, which takes longer the more there are."""

LEAST_SPLIT = 64
"""Tokens of the shortest split: one tile of 16 for each warp."""

INVARIANT_SPLIT = 256
"""Tokens of a split under ``batch_invariant``, for contexts of up to `MAX_SPLITS` of them."""

_LOG2_E = math.log2(math.e)


class _PagedArgs(ctypes.Structure):
    """``struct PagedArgs`` of ``paged.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "k", "v", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("page_table", "lens", "query_starts", "part", "tickets")),
        *((name, ctypes.c_longlong) for name in ("q_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("table_stride", "requests", "heads", "kv_heads")),
        *((name, ctypes.c_int) for name in ("group", "window", "split")),
        ("scale", ctypes.c_float),
    )


class _WriteArgs(ctypes.Structure):
    """``struct WriteArgs`` of ``paged_write.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cosine", "sine", "norm")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k_scale", "v_scale", "slots")),
        *((name, ctypes.c_longlong) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads")),
        ("eps", ctypes.c_float),
    )


def defines(problem: AttentionProblem) -> dict[str, int]:
    """Return the macros that every kernel gets for a problem."""
    return {
        "D": problem.head_dim,
        "PAGE": problem.page_size,
        "INT8": int(problem.kv_dtype == "int8"),
        "BF16": int(problem.act_dtype == "bfloat16"),
    }


def head_tiles(group: int) -> tuple[int, int]:
    """Return (tiles of 8 heads a block, blocks a kv head) for this many query heads of one kv head."""
    per_block = 1 if group <= 8 else 2
    return per_block, -(-group // (8 * per_block))


def misfit(problem: AttentionProblem) -> str | None:
    """Return why the kernels cannot serve a problem that the descriptor lets pass, or None."""
    if problem.page_size % 16:
        return f"serves page sizes that are a multiple of 16, asked for {problem.page_size}"
    if problem.kv_dtype not in (problem.act_dtype, "int8"):
        return f"stores the activations' dtype or int8, asked for {problem.kv_dtype} under {problem.act_dtype}"
    if problem.heads % problem.kv_heads:
        return f"needs heads that divide among the kv heads, asked for {problem.heads} and {problem.kv_heads}"
    return None


@frozen(kw_only=True)
class PagedStep:
    """One step: what its launches read, all on the device, and their grids.

    Attributes:
        fields: Arguments that every layer shares.
        slots: Where new tokens go.
        tokens: Tokens of the step.
        splits: Blocks of one context in the decode kernel; 0: no request has a single token.
        requests: Requests of the step.
        tiles: Tiles of query tokens in the chunk kernel; 0: every request has a single token.
        keep: What owns the memory behind ``fields``.
    """

    fields: Mapping[str, int]
    slots: torch.Tensor = field(eq=False)
    tokens: int
    splits: int
    requests: int
    tiles: int
    keep: AttentionBatch = field(eq=False)


class PagedAttention:
    """The same launch gives the same bits.

    Cache tensors of a layer: ``k`` and ``v`` ``[pages, kv_heads, page_size, head_dim]``; for INT8 also ``k_scale`` and
    ``v_scale`` float32 ``[pages, kv_heads, page_size]``, one scale per token and head.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        """Remember the shape of the model; nothing is compiled before `warm_up` or the first step.

        Raises:
            KernelError: The kernels cannot serve it.
        """
        reason = misfit(problem)
        if reason is not None:
            raise KernelError(f"paged attention {reason}; name another backend under [attention] backend")
        self._problem = problem
        self._group = problem.heads // problem.kv_heads
        self._int8 = problem.kv_dtype == "int8"
        tiles, self._head_blocks = head_tiles(self._group)
        self._head_slots = 8 * tiles
        self._sms = 0
        self._scratch: dict[int, Workspaces] = {}
        self.most_splits = DEFAULT_SPLITS
        longest = -(-problem.max_model_len // MAX_SPLITS)
        self._fixed_split = max(INVARIANT_SPLIT, -(-longest // LEAST_SPLIT) * LEAST_SPLIT)
        shared = {
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "group": self._group,
            "split": self._fixed_split if problem.batch_invariant else 0,
            "scale": problem.scale * _LOG2_E,
        }
        macros, include = defines(problem), (CSRC,)
        self._decode = StructKernel(
            CSRC / "paged_decode.cu",
            "paged_decode",
            _PagedArgs,
            {**macros, "NT": tiles},
            include=include,
            constants=shared,
        )
        self._chunk = StructKernel(
            CSRC / "paged_chunk.cu", "paged_chunk", _PagedArgs, macros, include=include, constants=shared
        )
        self._write = StructKernel(
            CSRC / "paged_write.cu",
            "paged_write",
            _WriteArgs,
            macros,
            include=include,
            constants={"heads": problem.heads, "kv_heads": problem.kv_heads},
        )

    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return one layer's cache tensors for this many pages."""
        problem = self._problem
        tokens = (pages, problem.kv_heads, problem.page_size)
        values = ((*tokens, problem.head_dim), problem.kv_dtype)
        if not self._int8:
            return {"k": values, "v": values}
        return {"k": values, "v": values, "k_scale": (tokens, "float32"), "v_scale": (tokens, "float32")}

    def plan_step(self, batch: AttentionBatch) -> PagedStep:
        """Choose the grids; they follow from counts and the batch's bound, never from the lengths themselves.

        In an eager step a kernel for which no request is there is not launched; a captured one holds both, unless
        there are as many tokens as requests.
        """
        tokens, requests = batch.slots.shape[0], batch.lens.shape[0]
        single = tokens == requests
        if single:
            assert all(n == 1 for n in batch.query_lens), "as many tokens as requests, but not one of each"
        captured = batch.slots.is_cuda and torch.cuda.is_current_stream_capturing()
        chunks = not single and (captured or any(n > 1 for n in batch.query_lens))
        decodes = single or captured or any(n == 1 for n in batch.query_lens)
        return PagedStep(
            fields={
                "page_table": batch.page_table.data_ptr(),
                "table_stride": batch.page_table.stride(0),
                "lens": batch.lens.data_ptr(),
                "query_starts": batch.query_starts.data_ptr(),
                "requests": requests,
            },
            slots=batch.slots,
            tokens=tokens,
            splits=self.splits(requests, batch.max_kv_len) if decodes else 0,
            requests=requests,
            tiles=tokens // CHUNK_ROWS + min(requests, tokens) if chunks else 0,
            keep=batch,
        )

    def splits(self, requests: int, bound: int) -> int:
        """Return the blocks of one context: enough to fill the card twice, each with work if contexts are long.

        Requests count as the next power of two, so that a padded batch is cut as an unpadded one, and a bound above
        the lengths adds only blocks without work: the cuts are the same.
        """
        if self._problem.batch_invariant:
            return max(1, min(MAX_SPLITS, -(-bound // self._fixed_split)))
        if not self._sms:
            self._sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        contexts = (1 << (max(requests, 1) - 1).bit_length()) * self._problem.kv_heads * self._head_blocks
        fill = max(1, min(self.most_splits, 2 * self._sms // contexts))
        return max(1, min(fill, -(-bound // LEAST_SPLIT)))

    def write_kv(
        self, layer: int, kv: Mapping[str, torch.Tensor], k: torch.Tensor, v: torch.Tensor, meta: PagedStep
    ) -> None:
        """Store the new tokens at their slots, quantized for an INT8 cache."""
        self._store(kv, None, _dense_heads(k), _dense_heads(v), meta, {"cosine": None, "sine": None, "norm": None})

    def rotate_and_write(
        self,
        layer: int,
        kv: Mapping[str, torch.Tensor],
        qkv: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        meta: PagedStep,
        norm: HeadNorm | None = None,
    ) -> None:
        """Norm and rotate queries in place, norm, rotate and store keys, store values: one launch."""
        heads, kv_heads = self._problem.heads, self._problem.kv_heads
        assert qkv.stride(2) == 1 and qkv.stride(1) == qkv.shape[2], "the heads of a token must lie together"  # noqa: PT018
        cosine, sine = cos_sin
        assert cosine.is_contiguous() and sine.is_contiguous()  # noqa: PT018
        extra: dict[str, float | None] = {
            "cosine": cosine.data_ptr(),
            "sine": sine.data_ptr(),
            "norm": None if norm is None else norm.weight.data_ptr(),
            "eps": 0.0 if norm is None else norm.eps,
        }
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        self._store(kv, q, k, v, meta, extra)

    def _store(
        self,
        kv: Mapping[str, torch.Tensor],
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: PagedStep,
        extra: Mapping[str, float | None],
    ) -> None:
        rows = 2 * self._problem.kv_heads + (0 if q is None else self._problem.heads)
        fields = {
            "q": None if q is None else q.data_ptr(),
            "k": k.data_ptr(),
            "v": v.data_ptr(),
            "k_cache": kv["k"].data_ptr(),
            "v_cache": kv["v"].data_ptr(),
            "k_scale": kv["k_scale"].data_ptr() if self._int8 else None,
            "v_scale": kv["v_scale"].data_ptr() if self._int8 else None,
            "slots": meta.slots.data_ptr(),
            "q_stride": 0 if q is None else q.stride(0),
            "k_stride": k.stride(0),
            "v_stride": v.stride(0),
            **extra,
        }
        self._write(k.device.index, (-(-rows // WRITE_WARPS), k.shape[0], 1), 32 * WRITE_WARPS, fields)

    def run(
        self, layer: int, q: torch.Tensor, kv: Mapping[str, torch.Tensor], meta: PagedStep, out: torch.Tensor
    ) -> None:
        """Attend: one launch for the requests with a single token, one for the others."""
        problem, device = self._problem, q.device.index
        q = _dense_heads(q)
        assert out.stride(2) == 1 and out.stride(1) == problem.head_dim, "the heads of a token must lie together"  # noqa: PT018
        fields: dict[str, int | None] = {
            **meta.fields,
            "q": q.data_ptr(),
            "out": out.data_ptr(),
            "k": kv["k"].data_ptr(),
            "v": kv["v"].data_ptr(),
            "k_scale": kv["k_scale"].data_ptr() if self._int8 else None,
            "v_scale": kv["v_scale"].data_ptr() if self._int8 else None,
            "q_stride": q.stride(0),
            "out_stride": out.stride(0),
            "window": problem.sliding_windows[layer] or 0,
        }
        if meta.splits:
            blocks = problem.kv_heads * self._head_blocks
            if meta.splits > 1:
                fields["tickets"], fields["part"] = self._sums(device, meta.requests, meta.splits)
            self._decode(device, (meta.splits, blocks, meta.requests), THREADS, fields)
        if meta.tiles:
            self._chunk(device, (problem.heads, meta.tiles, 1), THREADS, fields)

    def copy_page(self, kv: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one page of one layer's cache."""
        for cache in kv.values():
            cache[target].copy_(cache[source])

    def workspace_bytes(self) -> int:
        """Return the bytes of the splits' sums on one stream for the largest step."""
        problem = self._problem
        sizes = [1 << i for i in range(problem.max_requests.bit_length())] + [problem.max_requests]
        return max(self._sum_bytes(n, self.splits(n, problem.max_model_len)) for n in sizes)

    def warm_up(self, query_lens: Sequence[int]) -> None:
        """Compile everything: a few kernels serve every length; and take the workspace of the current stream."""
        device = torch.cuda.current_device()
        for kernel in (self._write, self._decode, self._chunk):
            kernel.load(device)
        self._sums(device, 1, 1)

    def _ticket_bytes(self) -> int:
        count = self._problem.max_requests * self._problem.kv_heads * self._head_blocks
        return -(-count * 4 // 128) * 128

    def _sum_bytes(self, requests: int, splits: int) -> int:
        part = self._head_slots * (self._problem.head_dim + 2) * 4
        return self._ticket_bytes() + requests * self._problem.kv_heads * self._head_blocks * splits * part

    def _sums(self, device: int, requests: int, splits: int) -> tuple[int, int]:
        """Return the addresses of arrival counters and of sums, in the current stream's own buffer."""
        scratch = self._scratch.get(device)
        if scratch is None:
            scratch = self._scratch[device] = Workspaces(torch.device("cuda", device))
            scratch.reserve("paged", self.workspace_bytes())
        buffer = scratch.get("paged")
        assert buffer is not None
        if requests > self._problem.max_requests or self._sum_bytes(requests, splits) > buffer.numel():
            raise KernelError(
                f"paged attention was made for {self._problem.max_requests} requests of up to "
                f"{self._problem.max_model_len} tokens, got a step of {requests} with {splits} splits; raise "
                "[scheduler] max_requests or [cache] max_model_len"
            )
        start = buffer.data_ptr()
        return start, start + self._ticket_bytes()


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x ``[tokens, heads, head_dim]``, copied unless the heads of a token lie together on 16 bytes."""
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if together and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
