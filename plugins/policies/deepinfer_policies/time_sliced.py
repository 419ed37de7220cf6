"""time_sliced: serial with a budget of milliseconds for each prefill slice instead of a number of tokens."""

from __future__ import annotations

from attrs import field, frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, StepFeedback
from deepinfer_policies import options as check
from deepinfer_policies.chunks import largest_chunk


@frozen(kw_only=True)
class TimeSlicedOptions:
    """Options of `TimeSliced`.

    Attributes:
        slice_ms: What a prefill forward may take while requests decode; without any it takes a whole chunk.
    """

    slice_ms: float = field(default=50.0, validator=[check.given, check.milliseconds])


class TimeSliced:
    """Two forwards a cycle; the second is as long as the slice, on any device and at any context length."""

    def __init__(self, options: TimeSlicedOptions | None = None) -> None:
        self._options = options or TimeSlicedOptions()

    def plan(self, view: EngineView) -> Plan:
        """Return a decode work, then a prefill work that fits the slice."""
        builder = PlanBuilder(view)
        for lane in builder.idle[:1]:
            rows = builder.decode_rows()
            builder.add(lane, rows)
            for head in builder.next_prefills()[:1]:
                room = builder.room()
                tokens = largest_chunk(view, head, room, self._options.slice_ms) if rows else room
                builder.add(lane, builder.prefill_chunk(tokens))
        return builder.build()

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing: the engine fits the cost model that slices are cut by."""
