"""Every layout of this distribution, held to the suite that authors use."""

from deepinfer_fp16.plugin import deepinfer_linear_backends

from deepinfer_core.testing.layout import layout_suites
from deepinfer_core.testing.linear_cases import registered_names

SUITES = layout_suites(deepinfer_linear_backends())
globals().update(SUITES)


def test_every_registered_layout_has_a_suite() -> None:
    assert {suite.specs()[0].name for suite in SUITES.values()} == registered_names("layouts", "deepinfer-plugin-fp16")
