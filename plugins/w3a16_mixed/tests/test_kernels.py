"""Every kernel of this distribution, held to the suite that authors use."""

from deepinfer_w3a16.plugin import deepinfer_linear_backends

from deepinfer_core.testing.linear import kernel_suites
from deepinfer_core.testing.linear_cases import registered_names

SUITES = kernel_suites(deepinfer_linear_backends())
globals().update(SUITES)


def test_every_registered_kernel_has_a_suite() -> None:
    assert {suite.specs()[0].name for suite in SUITES.values()} == registered_names("kernels", "deepinfer-plugin-w3a16")
