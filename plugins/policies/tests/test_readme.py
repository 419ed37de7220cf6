"""The README's policy of one's own works as it is written, and fails where the README says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.plugin_api import EngineView, Limits, Plan, PlanBuilder, StepFeedback
from deepinfer_core.testing.simulator import PolicyError, Simulator
from deepinfer_core.testing.trace import Arrival, random_trace

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
LIMITS = Limits(max_batched_tokens=256, max_requests=64, prefill_chunk_tokens=128, page_size=16, max_model_len=2048)


def _shortest_first() -> Any:
    block = re.search(r"```python\n(class ShortestFirst.*?)```", README, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {
        "EngineView": EngineView,
        "Plan": Plan,
        "PlanBuilder": PlanBuilder,
        "StepFeedback": StepFeedback,
    }
    exec(block[1], names)
    return names["ShortestFirst"]()


def test_the_policy_of_the_readme_serves_everyone_when_there_is_an_end() -> None:
    result = Simulator(_shortest_first(), limits=LIMITS, total_pages=4096, patience=2000).run(random_trace(1))
    assert all(served.complete or served.aborted for served in result.served.values())


def test_and_starves_a_long_prompt_while_short_ones_flow() -> None:
    short = [Arrival(id=f"s{i}", at=i * 0.05, prompt_tokens=128, max_tokens=2) for i in range(200)]
    long = Arrival(id="long", at=0.1, prompt_tokens=600, max_tokens=2)
    with pytest.raises(PolicyError, match="starved: 'long'"):
        Simulator(_shortest_first(), limits=LIMITS, total_pages=4096, patience=100).run([long, *short])
