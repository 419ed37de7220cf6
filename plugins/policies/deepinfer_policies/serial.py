"""serial: one lane; a cycle decodes every running request, then computes one prefill chunk, round-robin."""

from __future__ import annotations

from attrs import field, frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, StepFeedback
from deepinfer_policies import options as check


@frozen(kw_only=True)
class SerialOptions:
    """Options of `Serial`.

    Attributes:
        chunk_tokens: Prompt tokens of one chunk; None for the scheduler's ``prefill_chunk_tokens``.
    """

    chunk_tokens: int | None = field(default=None, validator=check.tokens)


class Serial:
    """Two forwards a cycle, one after the other. Running streams wait for a whole chunk; the chunk decides how long."""

    def __init__(self, options: SerialOptions | None = None) -> None:
        self._options = options or SerialOptions()

    def plan(self, view: EngineView) -> Plan:
        """Return a decode work, then a prefill work, on the one lane."""
        builder = PlanBuilder(view)
        for lane in builder.idle[:1]:
            builder.add(lane, builder.decode_rows())
            builder.add(lane, builder.prefill_chunk(builder.room(chunk=self._options.chunk_tokens)))
        return builder.build()

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing: the plan depends on the view alone."""
