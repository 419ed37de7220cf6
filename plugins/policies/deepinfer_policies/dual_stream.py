"""dual_stream: two lanes with disjoint requests; decodes go on, at high priority, while a prefill chunk runs."""

from __future__ import annotations

from attrs import field, frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, StepFeedback
from deepinfer_policies import options as check


@frozen(kw_only=True)
class DualStreamOptions:
    """Options of `DualStream`.

    Attributes:
        chunk_tokens: Prompt tokens of one chunk; None for the scheduler's ``prefill_chunk_tokens``.
    """

    chunk_tokens: int | None = field(default=None, validator=check.tokens)


class DualStream:
    """Each lane is filled when it is idle, whatever the other does. With one lane it is serial."""

    def __init__(self, options: DualStreamOptions | None = None) -> None:
        self._options = options or DualStreamOptions()

    def plan(self, view: EngineView) -> Plan:
        """Return a decode work, a prefill work, or both, for the lanes that are idle."""
        builder = PlanBuilder(view)
        by_priority = sorted(view.lanes, key=lambda lane: -lane.priority)
        decode, prefill = by_priority[0].name, by_priority[-1].name
        if decode in builder.idle:
            builder.add(decode, builder.decode_rows())
        if prefill in builder.idle:
            builder.add(prefill, builder.prefill_chunk(builder.room(chunk=self._options.chunk_tokens)))
        return builder.build()

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing: the plan depends on the view alone."""
