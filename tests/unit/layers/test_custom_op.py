"""The torch operator of a layer: what opcheck demands, tracing, lifetime."""

import pytest
import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.layers.custom_op import as_operator
from deepinfer_core.layers.linear import Linear
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.registry.catalog import Catalog, make_scheme
from deepinfer_core.registry.discovery import discover
from deepinfer_core.registry.select import select_linear


@pytest.fixture(scope="module")
def layer():
    catalog = Catalog.from_discovery(discover())
    problem = LinearProblem(n=48, k=64, m_max=16, device="cpu", act_dtype="float32", scheme="w4a16", group_size=32)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    stored = make_scheme(catalog, "w4a16").quantize(weight, group_size=32, zeros=False)
    return Linear.build(select_linear(catalog, problem), stored, device="cpu")


def test_the_operator_computes_what_the_layer_computes(layer):
    x, residual = torch.randn(3, 64), torch.randn(3, 48)
    operator = as_operator(layer)
    assert torch.equal(operator(x), layer(x))
    assert torch.equal(operator(x, residual), layer(x, residual))


@pytest.mark.parametrize("residual", [None, torch.randn(3, 48)], ids=["plain", "residual"])
def test_opcheck_passes(layer, residual):
    operator = as_operator(layer)
    torch.library.opcheck(torch.ops.deepinfer.linear.default, (torch.randn(3, 64), operator.number, 48, residual))


def test_export_sees_one_node(layer):
    operator = as_operator(layer)

    class Model(torch.nn.Module):
        def forward(self, x):
            return operator(x) * 2

    program = torch.export.export(Model(), (torch.randn(3, 64),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets[0] == "deepinfer.linear.default"
    assert len(targets) == 2


def test_a_layer_that_is_gone_is_a_named_error(layer):
    as_operator(layer)
    with pytest.raises(KernelError, match=r"layer 999999 .* is gone"):
        torch.ops.deepinfer.linear(torch.randn(1, 64), 999_999, 48, None)
