"""Every kernel of this distribution, held to the suite that authors use."""

from deepinfer_fp16.plugin import deepinfer_linear_backends

from deepinfer_core.testing.linear import kernel_suites
from deepinfer_core.testing.linear_cases import registered_names

HEAD = ((7001, 577),)  # layers with fewer weights are refused by the FP16 form's predicate
SUITES = kernel_suites(deepinfer_linear_backends(), shapes={"fp16.half_cpu": HEAD, "fp16.half_cpu_chunked": HEAD})
globals().update(SUITES)


def test_every_registered_kernel_has_a_suite() -> None:
    assert {suite.specs()[0].name for suite in SUITES.values()} == registered_names("kernels", "deepinfer-plugin-fp16")
