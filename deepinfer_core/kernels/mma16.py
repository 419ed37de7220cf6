"""Fragment-order weight records for ``mma.m16n8k16``: what ``w4a16.mma16.v1`` and ``w3a16.mma16.v1`` share.

A record holds 16 output features x 128 k. Two resident tensors, so that codes start on cache lines:
``codes`` uint8 ``[ceil(N/16), ceil(K/128), bits * 256]`` and ``groups`` FP16 ``[ceil(N/16), ceil(K/128), S, 16]``, the
scales of the record's groups and then (with zeros) their zeros. Whatever runs along k reads contiguous streams.
``include/decode.cuh`` says where each code lies and why.

Codes are stored unsigned. Padding along N and K has code 0, scale 0 and zero 0. A whole-row group is stored as groups
of 128 with the row's scale repeated (3 % more bytes), so that kernels know groups of 32, 64 and 128 alone.
"""

from __future__ import annotations

import torch

FEATURES = 16
UNIT = 128
"""k per record."""

_CHUNK_CODES = 1 << 23
"""Codes handled at a time, so that packing needs about 200 MB beside the weights and not 16 bytes a weight."""

# (fragment, register) of each of the 15 half-pairs A B C D E of the three words of W3, by word; (0, 3) is spread.
_W3_PLACES = (
    {"A": (0, 0), "B": (1, 0), "C": (2, 2), "D": (2, 0), "E": (3, 2)},
    {"A": (0, 1), "B": (1, 1), "C": (2, 3), "D": (2, 1), "E": (3, 3)},
    {"A": (0, 2), "B": (1, 2), "C": (3, 0), "D": (1, 3), "E": (3, 1)},
)
_W3_SHIFTS = {"A": 1, "B": 4, "C": 7, "D": 10, "E": 13}
_W3_SPREAD = (0, 3)


def stored_group(group_size: int) -> int:
    """Return the group size that records use: the whole row becomes groups of 128."""
    if group_size not in (32, 64, 128, -1):
        raise ValueError(f"records hold groups of 32, 64, 128 or -1 (whole row), got {group_size}")
    return UNIT if group_size == -1 else group_size


def record_rows(group_size: int, *, zeros: bool) -> int:
    """Return the rows of 16 FP16 values a record has in ``groups``."""
    return UNIT // stored_group(group_size) * (2 if zeros else 1)


def records_nbytes(bits: int, n: int, k: int, group_size: int, *, zeros: bool) -> int:
    """Return the bytes of both tensors."""
    return -(-n // FEATURES) * -(-k // UNIT) * (bits * 256 + 32 * record_rows(group_size, zeros=zeros))


def pack_records(
    bits: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build ``codes`` and ``groups`` from unsigned codes ``[N, K]`` (uint8), FP16 scales and zeros ``[N, groups]``."""
    n, k = codes.shape
    tiles, units = -(-n // FEATURES), -(-k // UNIT)
    out = torch.empty((tiles, units, bits * 256), dtype=torch.uint8, device=codes.device)
    tile_step = max(1, _CHUNK_CODES // (FEATURES * units * UNIT))
    for t0 in range(0, tiles, tile_step):
        t1 = min(t0 + tile_step, tiles)
        part = codes.new_zeros((t1 - t0) * FEATURES, units * UNIT)
        rows = codes[t0 * FEATURES : t1 * FEATURES]
        part[: rows.shape[0], :k] = rows
        words = _words_w4(part) if bits == 4 else _words_w3(part)
        out[t0:t1] = words.view(torch.uint8).view(t1 - t0, units, bits * 256)
    stored = [_arrange_groups(values, tiles, units, group_size) for values in (scales, zeros) if values is not None]
    return out, torch.cat(stored, dim=2) if len(stored) > 1 else stored[0]


def unpack_records(
    bits: int, codes: torch.Tensor, groups: torch.Tensor, n: int, k: int, group_size: int, *, zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return unsigned codes ``[N, K]``, scales and zeros ``[N, groups]``: the inverse of `pack_records`."""
    tiles, units, _ = codes.shape
    out = torch.empty((tiles * FEATURES, units * UNIT), dtype=torch.uint8, device=codes.device)
    tile_step = max(1, _CHUNK_CODES // (FEATURES * units * UNIT))
    for t0 in range(0, tiles, tile_step):
        t1 = min(t0 + tile_step, tiles)
        words = codes[t0:t1].contiguous().view(torch.int32)
        out[t0 * FEATURES : t1 * FEATURES] = _codes_w4(words) if bits == 4 else _codes_w3(words)
    rows = UNIT // stored_group(group_size)
    scales = _collect_groups(groups[:, :, :rows], n, k, group_size)
    found = _collect_groups(groups[:, :, rows:], n, k, group_size) if zeros else None
    return out[:n, :k].contiguous(), scales, found


def dequantize_records(
    bits: int,
    codes: torch.Tensor,
    groups: torch.Tensor,
    n0: int,
    n1: int,
    k: int,
    group_size: int,
    *,
    zeros: bool,
    out: torch.Tensor,
) -> None:
    """Write the values of features ``n0:n1`` into ``out`` ``[n1 - n0, K]``, computed in float32 and rounded once."""
    if n1 <= n0:
        return
    t0, t1 = n0 // FEATURES, -(-n1 // FEATURES)
    first = t0 * FEATURES
    plain, scales, found = unpack_records(
        bits, codes[t0:t1], groups[t0:t1], (t1 - t0) * FEATURES, k, group_size, zeros=zeros
    )
    group = k if group_size == -1 else group_size
    values = plain.to(torch.float32)
    if found is None:
        values -= 1 << (bits - 1)
    else:
        values -= found.float().repeat_interleave(group, 1)[:, :k]
    values *= scales.float().repeat_interleave(group, 1)[:, :k]
    out.copy_(values[n0 - first : n1 - first])


def _fragments(part: torch.Tensor) -> torch.Tensor:
    """View ``[16 tiles, 128 units]`` as tile, hi, g, unit, half, a, t, b, pair, e: rows 8 hi + g, k by decode.cuh."""
    return part.view(part.shape[0] // 16, 2, 8, part.shape[1] // 128, 2, 2, 4, 2, 2, 2)


def _signed_words(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _words_w4(part: torch.Tensor) -> torch.Tensor:
    # -> tile, unit, half, g, t, a, b, then the eight nibbles by e, hi, pair
    nibbles = _fragments(part).permute(0, 3, 4, 2, 6, 5, 7, 9, 1, 8)
    nibbles = nibbles.reshape(*nibbles.shape[:7], 8)
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int64, device=part.device)
    for i in range(8):
        words |= nibbles[..., i].to(torch.int64) << (4 * i)
    return _signed_words(((words << 2) | (words >> 30)) & 0xFFFFFFFF).contiguous()


def _codes_w4(words: torch.Tensor) -> torch.Tensor:
    tiles, units = words.shape[:2]
    w = words.to(torch.int64) & 0xFFFFFFFF
    w = (w >> 2) | ((w << 30) & 0xFFFFFFFF)
    nibbles = torch.stack([((w >> (4 * i)) & 15).to(torch.uint8) for i in range(8)], dim=-1)
    # tile, unit, half, g, t, a, b, e, hi, pair -> tile, hi, g, unit, half, a, t, b, pair, e
    nibbles = nibbles.view(tiles, units, 2, 8, 4, 2, 2, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 4, 6, 9, 7)
    return nibbles.reshape(tiles * 16, units * 128)


def _words_w3(part: torch.Tensor) -> torch.Tensor:
    # -> tile, unit, g, t, half, a, b, pair, hi, e
    view = _fragments(part).permute(0, 3, 2, 6, 4, 5, 7, 8, 1, 9)
    tiles, units = view.shape[:2]
    pairs = view.reshape(tiles, units, 8, 4, 2, 4, 4, 2)  # ..., fragment, register, e
    words = torch.zeros((tiles, units, 3, 8, 4, 2), dtype=torch.int64, device=part.device)
    for e in range(2):
        spread = pairs[..., _W3_SPREAD[0], _W3_SPREAD[1], e].to(torch.int64)
        for j, places in enumerate(_W3_PLACES):
            for letter, (f, r) in places.items():
                words[:, :, j] |= pairs[..., f, r, e].to(torch.int64) << (_W3_SHIFTS[letter] + 16 * e)
            words[:, :, j] |= ((spread >> j) & 1) << (16 * e)
    return _signed_words(words).contiguous()


def _codes_w3(words: torch.Tensor) -> torch.Tensor:
    tiles, units = words.shape[:2]
    w = (words.to(torch.int64) & 0xFFFFFFFF).view(tiles, units, 3, 8, 4, 2)
    pairs = torch.zeros((tiles, units, 8, 4, 2, 4, 4, 2), dtype=torch.uint8, device=words.device)
    for e in range(2):
        spread = torch.zeros_like(w[:, :, 0])
        for j, places in enumerate(_W3_PLACES):
            for letter, (f, r) in places.items():
                pairs[..., f, r, e] = ((w[:, :, j] >> (_W3_SHIFTS[letter] + 16 * e)) & 7).to(torch.uint8)
            spread |= ((w[:, :, j] >> (16 * e)) & 1) << j
        pairs[..., _W3_SPREAD[0], _W3_SPREAD[1], e] = spread.to(torch.uint8)
    # tile, unit, g, t, half, a, b, pair, hi, e -> tile, hi, g, unit, half, a, t, b, pair, e
    view = pairs.view(tiles, units, 8, 4, 2, 2, 2, 2, 2, 2).permute(0, 8, 2, 1, 4, 5, 3, 6, 7, 9)
    return view.reshape(tiles * 16, units * 128)


def _arrange_groups(values: torch.Tensor, tiles: int, units: int, group_size: int) -> torch.Tensor:
    """FP16 ``[N, groups]`` -> ``[tiles, units, groups a record, 16]``; features g and g + 8 lie side by side."""
    groups = units * UNIT // stored_group(group_size)
    padded = torch.zeros((tiles * FEATURES, groups), dtype=torch.float16, device=values.device)
    if group_size == -1:
        padded[: values.shape[0]] = values.to(torch.float16)
    else:
        padded[: values.shape[0], : values.shape[1]] = values
    view = padded.view(tiles, 2, 8, units, groups // units)
    return view.permute(0, 3, 4, 2, 1).reshape(tiles, units, groups // units, FEATURES).contiguous()


def _collect_groups(part: torch.Tensor, n: int, k: int, group_size: int) -> torch.Tensor:
    tiles, units, rows, _ = part.shape
    full = part.reshape(tiles, units, rows, 8, 2).permute(0, 4, 3, 1, 2).reshape(tiles * FEATURES, units * rows)
    groups = 1 if group_size == -1 else -(-k // group_size)
    return full[:n, :groups].contiguous()
