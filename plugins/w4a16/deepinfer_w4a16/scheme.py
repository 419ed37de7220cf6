"""Scheme `w4a16`: two 4-bit codes a byte, the even k in the low nibble."""

from __future__ import annotations

import torch

from deepinfer_core.kernels.groupwise import GroupwiseScheme


class W4A16(GroupwiseScheme):
    """Codes -8..7 without zeros, 0..15 with; ``packed`` is uint8 ``[N, ceil(K / 2)]``."""

    name = "w4a16"
    bits = 4
    unit = (2, 1)

    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        """Pack codes ``[N, K]``; the high nibble behind an odd K is 0. Both ranges keep their lowest four bits."""
        nibbles = (codes.to(torch.int16) & 0xF).to(torch.uint8)
        if codes.shape[1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)

    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        """Return int8 codes ``[N, K]``."""
        codes = torch.empty(packed.shape[0], packed.shape[1], 2, dtype=torch.int8, device=packed.device)
        if zeros:
            codes[..., 0] = packed & 0xF
            codes[..., 1] = packed >> 4
        else:
            signed = packed.view(torch.int8)
            codes[..., 0] = (signed << 4) >> 4  # an arithmetic shift carries the nibble's sign down
            codes[..., 1] = signed >> 4
        return codes.flatten(1)[:, :k]
