"""mixed: one lane; each forward holds every decode row and a prefill chunk, so the weights are read once for both."""

from __future__ import annotations

from attrs import field, frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, StepFeedback
from deepinfer_policies import options as check


@frozen(kw_only=True)
class MixedOptions:
    """Options of `Mixed`.

    Attributes:
        chunk_tokens: Prompt tokens beside the decode rows; None for the scheduler's ``prefill_chunk_tokens``.
    """

    chunk_tokens: int | None = field(default=None, validator=check.tokens)


class Mixed:
    """One forward a cycle. A small chunk rides on the weight read that the decodes pay anyway."""

    def __init__(self, options: MixedOptions | None = None) -> None:
        self._options = options or MixedOptions()

    def plan(self, view: EngineView) -> Plan:
        """Return one work of decode rows and a chunk."""
        builder = PlanBuilder(view)
        for lane in builder.idle[:1]:
            rows = builder.decode_rows()
            room = builder.room(rows, self._options.chunk_tokens)
            if room:
                builder.add(lane, rows + builder.prefill_chunk(room))
            else:  # rows alone fill a forward: prompts get one of their own, or they would wait for ever
                builder.add(lane, rows)
                builder.add(lane, builder.prefill_chunk(builder.room(chunk=self._options.chunk_tokens)))
        return builder.build()

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing: the plan depends on the view alone."""
