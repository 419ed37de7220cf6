"""Scheme `w3a16`: eight 3-bit codes in three bytes, least significant bit first."""

from __future__ import annotations

import torch

from deepinfer_core.kernels.groupwise import GroupwiseScheme


class W3A16(GroupwiseScheme):
    """Codes -4..3 without zeros, 0..7 with; ``packed`` is uint8 ``[N, 3 * ceil(K / 8)]``.

    Code i of eight occupies bits 3i..3i+2 of the 24-bit little-endian number that the three bytes make.
    """

    name = "w3a16"
    bits = 3
    unit = (8, 3)

    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        """Pack codes ``[N, K]``; codes behind K are 0. Both ranges keep their lowest three bits."""
        n, k = codes.shape
        bits = (codes.to(torch.int16) & 0x7).to(torch.uint8)
        q = torch.nn.functional.pad(bits, (0, -k % 8)).view(n, -1, 8)
        packed = torch.empty(n, q.shape[1], 3, dtype=torch.uint8, device=codes.device)
        # uint8 shifts drop what leaves the byte, which is what the next byte then holds.
        packed[..., 0] = q[..., 0] | q[..., 1] << 3 | q[..., 2] << 6
        packed[..., 1] = q[..., 2] >> 2 | q[..., 3] << 1 | q[..., 4] << 4 | q[..., 5] << 7
        packed[..., 2] = q[..., 5] >> 1 | q[..., 6] << 2 | q[..., 7] << 5
        return packed.flatten(1)

    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        """Return int8 codes ``[N, K]``."""
        b0, b1, b2 = packed.unflatten(1, (-1, 3)).unbind(2)
        codes = torch.empty(*b0.shape, 8, dtype=torch.uint8, device=packed.device)
        codes[..., 0] = b0
        codes[..., 1] = b0 >> 3
        codes[..., 2] = b0 >> 6 | b1 << 2
        codes[..., 3] = b1 >> 1
        codes[..., 4] = b1 >> 4
        codes[..., 5] = b1 >> 7 | b2 << 1
        codes[..., 6] = b2 >> 2
        codes[..., 7] = b2 >> 5
        codes &= 0x7
        signed = codes.flatten(1)[:, :k].view(torch.int8)
        return signed if zeros else signed.bitwise_xor_(4).sub_(4)
