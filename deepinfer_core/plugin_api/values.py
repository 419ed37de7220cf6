"""Small values shared by all descriptors: ranges of M, compute capabilities, dtype and stability names."""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen

API_VERSION: tuple[int, int] = (1, 0)
"""Version of this contract. A plugin with another major, or a newer minor, is held back by name."""

ENTRY_POINT_GROUP = "deepinfer.plugins"

Device = Literal["cuda", "cpu"]
Stability = Literal["stable", "experimental"]
Capability = tuple[int, int]

DTYPES = ("float16", "bfloat16", "float32")
"""Activation dtypes by torch's names, as strings so that descriptors import without torch."""

WHOLE_ROW = -1
"""Group size that means one scale for the whole row of K inputs."""

M_MAX = 1 << 31
"""Upper end of an open range of M."""


def parse_capability(text: str | int) -> Capability:
    """Read a compute capability written ``86``, ``8.6``, ``sm_86`` or ``120``.

    Raises:
        ValueError: The text is not a capability.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", str(text).strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a compute capability; write it like 86, 8.6 or sm_86")
    return int(match[1]), int(match[2])


@frozen(order=True)
class MRange:
    """Rows M that a kernel serves, both ends included.

    Attributes:
        lo: Smallest M, at least 1.
        hi: Largest M; ``M_MAX`` when open.
    """

    lo: int
    hi: int = M_MAX

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.lo <= self.hi:
            raise ValueError(f"a range of M needs 1 <= lo <= hi, got {self.lo}..{self.hi}")

    @classmethod
    def from_text(cls, text: str) -> MRange:
        """Read ``"4"``, ``"2..8"``, ``"9.."`` or ``"*"``.

        Raises:
            ValueError: The text is none of these.
        """
        if text.strip() == "*":
            return cls(1)
        match = re.fullmatch(r"\s*(\d+)\s*(?:(\.\.)\s*(\d*)\s*)?", text)
        if match is None:
            raise ValueError(f"{text!r} is not a range of M; write 4, 2..8, 9.. or *")
        lo = int(match[1])
        if match[2] is None:
            return cls(lo, lo)
        return cls(lo, int(match[3])) if match[3] else cls(lo)

    @property
    def width(self) -> int:
        """How many values of M the range holds; the narrower of two kernels wins a tie in priority."""
        return self.hi - self.lo + 1

    def __contains__(self, m: object) -> bool:
        return isinstance(m, int) and self.lo <= m <= self.hi

    def __str__(self) -> str:
        if self.lo == self.hi:
            return str(self.lo)
        return f"{self.lo}.." if self.hi >= M_MAX else f"{self.lo}..{self.hi}"


@frozen(kw_only=True)
class CapabilityRange:
    """CUDA compute capabilities that a kernel runs on, both ends included.

    Attributes:
        lo: Lowest ``(major, minor)``.
        hi: Highest, or None when every newer card will do.
    """

    lo: Capability = field()
    hi: Capability | None = None

    def __contains__(self, capability: object) -> bool:
        if not isinstance(capability, tuple):
            return False
        return self.lo <= capability and (self.hi is None or capability <= self.hi)

    def __str__(self) -> str:
        lo = f"sm_{self.lo[0]}{self.lo[1]}"
        return f"{lo}+" if self.hi is None else f"{lo}..sm_{self.hi[0]}{self.hi[1]}"
