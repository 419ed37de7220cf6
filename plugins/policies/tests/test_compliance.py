"""All five policies hold what core's suite asks of any policy."""

from __future__ import annotations

from typing import ClassVar

from deepinfer_policies.plugin import POLICIES

from deepinfer_core.testing.policy import PolicySuite

_BY_NAME = {spec.name: spec for spec in POLICIES}


class TestSerial(PolicySuite):
    spec = _BY_NAME["serial"]


class TestSerialOfSmallChunks(PolicySuite):
    spec = _BY_NAME["serial"]
    options: ClassVar = {"chunk_tokens": 16}


class TestDualStream(PolicySuite):
    spec = _BY_NAME["dual_stream"]


class TestMixed(PolicySuite):
    spec = _BY_NAME["mixed"]


class TestTimeSliced(PolicySuite):
    spec = _BY_NAME["time_sliced"]


class TestSlo(PolicySuite):
    spec = _BY_NAME["slo"]
    options: ClassVar = {"ttft_ms": 800}


class TestSloSliced(PolicySuite):
    spec = _BY_NAME["slo"]
    options: ClassVar = {"style": "sliced", "tpot_p95_ms": 30.0, "max_itl_ms": 40.0}
