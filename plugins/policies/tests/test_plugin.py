"""What the distribution lists, and that listing needs neither torch nor a policy's module."""

from __future__ import annotations

import importlib
import subprocess
import sys

from attrs import fields
from deepinfer_policies import plugin


def test_what_is_listed_is_nothing_or_all_five() -> None:
    listed = tuple(plugin.deepinfer_scheduling_policies())
    assert listed in ((), plugin.POLICIES)


def test_factories_and_options_exist_and_every_option_has_a_default() -> None:
    for spec in plugin.POLICIES:
        assert spec.options is not None
        options, factory = (
            getattr(importlib.import_module(name.partition(":")[0]), name.partition(":")[2])
            for name in (spec.options, spec.factory)
        )
        assert fields(options)
        factory()
        factory(options())


def test_only_dual_stream_has_two_lanes_and_decode_goes_first() -> None:
    lanes = {spec.name: spec.lanes for spec in plugin.POLICIES}
    decode, prefill = lanes.pop("dual_stream")
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert decode.priority > prefill.priority
    assert {len(one) for one in lanes.values()} == {1}


def test_policies_and_their_descriptors_import_without_torch() -> None:
    modules = ["plugin", "serial", "dual_stream", "mixed", "time_sliced", "slo"]
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import deepinfer_policies.{m}" for m in modules)
    subprocess.run([sys.executable, "-c", code], check=True)
