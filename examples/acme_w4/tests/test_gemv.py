"""The kernel, held to deepinfer's suite."""

from acme_w4.plugin import deepinfer_linear_backends

from deepinfer_core.testing.linear import LinearKernelSuite


class TestGemv(LinearKernelSuite):
    kernel = "acme-w4.gemv"
    backends = deepinfer_linear_backends()
