"""What a config asks of selection for one weight scheme."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from attrs import field, frozen


class LinearSettings(Protocol):
    """What a config says under ``[linear.<scheme>]``; its attributes are those of `LinearChoice`."""

    @property
    def backend(self) -> str:
        """A linear backend's name, or ``"auto"``."""
        ...

    @property
    def kernels(self) -> Mapping[str, str]:
        """Range of M -> kernel name."""
        ...

    @property
    def allow_experimental(self) -> bool:
        """Experimental kernels are candidates too."""
        ...

    @property
    def strict(self) -> bool:
        """A range of M that no kernel serves is an error."""
        ...


def _frozen_pins(kernels: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(kernels))


@frozen(kw_only=True)
class LinearChoice:
    """What a config asks for one scheme.

    Attributes:
        backend: A linear backend's name: its kernels alone are candidates. ``"auto"``: everybody's.
        kernels: Range of M -> kernel name, such as ``{"2..8": "w4a16.batch_tile_gemv"}``; a pin may name any
            backend's kernel, and fixes the layout for every M.
        allow_experimental: Experimental kernels are candidates too; a pinned one always is.
        strict: A range of M that no kernel serves is an error; core's fallback does not fill it.
    """

    backend: str = "auto"
    kernels: Mapping[str, str] = field(factory=dict, converter=_frozen_pins)
    allow_experimental: bool = False
    strict: bool = False

    @classmethod
    def from_settings(cls, settings: LinearSettings) -> LinearChoice:
        """Read the part of a config for one scheme."""
        return cls(
            backend=settings.backend,
            kernels=settings.kernels,
            allow_experimental=settings.allow_experimental,
            strict=settings.strict,
        )
