"""How works on two lanes share one device, as the simulator assumes it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen(kw_only=True)
class Sharing:
    """How works on different lanes share the device.

    A work has a part that waits for memory (weights and context: the cost's base and context terms) and one that
    computes (its tokens). Works side by side would ideally run at the rate at which neither the memory nor the compute
    parts exceed the device; ``interference`` takes away from what is gained over running one after another. Of the
    speed that is left, the lane of highest priority gets ``favour``, the others share the rest; equals share equally.

    Attributes:
        interference: 0 for the ideal, 1 for nothing gained. Streams on small cards gained 0..6 % of throughput: near 1.
        favour: Share of the lane with the highest priority, 0.5..1.
    """

    interference: float = 0.9
    favour: float = 0.7

    def rates(self, memory_parts: Sequence[float], priorities: Sequence[int]) -> list[float]:
        """Return how fast each of several works runs, 1 being its speed alone.

        Args:
            memory_parts: The part of each work's time alone that waits for memory, 0..1.
            priorities: Its lane's.
        """
        count = len(memory_parts)
        if count <= 1:
            return [1.0] * count
        ideal = count / max(1.0, sum(memory_parts), count - sum(memory_parts))
        speed = 1 + (1 - self.interference) * (ideal - 1)
        top = max(priorities)
        first = priorities.index(top)
        if priorities.count(top) > 1:
            return [min(1.0, speed / count)] * count
        favoured = min(1.0, self.favour * speed)
        rest = min(1.0, (speed - favoured) / (count - 1))
        return [favoured if i == first else rest for i in range(count)]
