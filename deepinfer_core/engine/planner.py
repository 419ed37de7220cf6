"""The door that every policy goes through: its plan is checked, and where it fails decode-first runs instead."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from deepinfer_core.engine.batch import Item
from deepinfer_core.engine.cost import OnlineCost
from deepinfer_core.engine.validate import decode_first, validate
from deepinfer_core.plugin_api import EngineView, Plan, SchedulingPolicy, StepFeedback

log = logging.getLogger("deepinfer.engine")

DECODE_FIRST = "decode_first"
"""Name of core's own planner, which runs when no policy is chosen and wherever one fails."""

BARREN_LIMIT = 8
"""Cycles in a row that may compute nothing, with nothing in flight, before decode-first takes over for one."""


class Planner:
    """Asks the policy, checks what it says, and counts by name what it breaks.

    Args:
        policy: None for decode-first alone.
        name: The policy's name.
    """

    def __init__(self, policy: SchedulingPolicy | None, name: str = DECODE_FIRST) -> None:
        self.name = name
        self.cost = OnlineCost()
        self.faults: Counter[str] = Counter()
        self.last_fault: str | None = None
        self.barren = 0
        self._policy = policy

    def plan(self, view: EngineView) -> Plan:
        """Return a plan that keeps the rules, whatever the policy does."""
        if self._policy is None:
            return decode_first(view)
        if self.barren >= BARREN_LIMIT:
            self._fault("stalled", f"nothing was computed in {self.barren} cycles for {len(view.waiting)} waiting")
            return decode_first(view)
        try:
            plan = self._policy.plan(view)
        except Exception as error:
            self._fault(type(error).__name__, f"plan raised {error!r}")
            return decode_first(view)
        broken = validate(plan, view)
        if broken is None:
            return plan
        self._fault(broken.rule, broken.message)
        return decode_first(view)

    def observe(self, feedback: StepFeedback) -> None:
        """Let cost model and policy learn from a finished work."""
        self.cost.observe(feedback)
        self._tell(feedback)

    def out_of_memory(self, lane: str, items: Sequence[Item]) -> None:
        """Let the policy learn that a work of these items found no memory."""
        decode = sum(item.decodes for item in items)
        self._tell(
            StepFeedback(
                lane=lane,
                ms=0.0,
                prefill_tokens=sum(item.tokens for item in items) - decode,
                decode_rows=decode,
                context=sum(item.start + item.tokens for item in items),
                out_of_memory=True,
            )
        )

    def _tell(self, feedback: StepFeedback) -> None:
        if self._policy is None:
            return
        try:
            self._policy.observe(feedback)
        except Exception as error:
            self._fault(type(error).__name__, f"observe raised {error!r}")

    def _fault(self, rule: str, message: str) -> None:
        if rule not in self.faults:  # once a rule: a policy that is wrong is wrong every step
            log.warning("policy %r broke %r: %s; decode-first ran instead", self.name, rule, message)
        self.faults[rule] += 1
        self.last_fault = f"{rule}: {message}"
