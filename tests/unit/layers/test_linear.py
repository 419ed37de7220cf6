"""The linear layer over a made-up layout and kernels: who is called, with what, and how often."""

import sys
import types

import pytest
import torch
from attrs import evolve

from deepinfer_core.errors import KernelError, PluginError
from deepinfer_core.layers.linear import BoundKernels, Linear
from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem, MRange, WeightLayoutSpec
from deepinfer_core.registry.catalog import Registered
from deepinfer_core.registry.dispatch import DispatchRow, DispatchTable
from deepinfer_core.registry.select import Selection

PROBLEM = LinearProblem(n=6, k=4, m_max=64, device="cpu", act_dtype="float32", scheme="made-up")


class Layout:
    def pack(self, problem, tensors):
        return dict(tensors)


class Kernel:
    """Computes the product and notes what it was given."""

    def __init__(self, problem):
        self.problem = problem
        self.calls = []
        self.warmed = []

    def warm_up(self, ms):
        self.warmed += ms

    def __call__(self, x, weights, out, *, bias=None, residual=None, workspace=None):
        self.calls.append((x.shape[0], residual is not None, workspace))
        out.copy_(x @ weights["weight"].t())
        for term in (bias, residual):
            if term is not None:
                out += term


class Broken:
    def __init__(self, problem):
        raise RuntimeError("no such instruction")


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    module = types.ModuleType("made_up_plugin")
    module.Layout, module.Kernel, module.Broken = Layout, Kernel, Broken
    module.workspace = lambda problem, m: 8 * m + problem.n
    monkeypatch.setitem(sys.modules, "made_up_plugin", module)


def registered(spec):
    return Registered(spec=spec, backend="made-up", distribution="made-up-dist", version="1.0")


def kernel_spec(name, m, **values):
    values = {"factory": "made_up_plugin:Kernel"} | values
    return LinearKernelSpec(
        name=name, scheme="made-up", layout="made-up.v1", device="cpu", m=m, act_dtypes=("float32",), **values
    )


def selection(problem=PROBLEM, many=None):
    one = kernel_spec("made-up.one", MRange(1), epilogues=("none", "residual"))
    many = many or kernel_spec("made-up.many", MRange(2))
    rows = (
        DispatchRow(m=MRange(1, 1), kernel=registered(one), why="priority 0"),
        DispatchRow(m=MRange(2, 64), kernel=registered(many), why="priority 0"),
    )
    layout = WeightLayoutSpec(name="made-up.v1", scheme="made-up", factory="made_up_plugin:Layout", devices=("cpu",))
    return Selection(problem=problem, layout=registered(layout), table=DispatchTable(rows), rejected=(), warnings=())


@pytest.fixture
def weight():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_the_number_of_rows_picks_the_kernel(weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    for m in (1, 2, 64):
        x = torch.randn(m, 4)
        torch.testing.assert_close(linear(x), x @ weight.t())
    assert [call[0] for call in linear.kernels.kernel_for(1).run.calls] == [1]
    assert [call[0] for call in linear.kernels.kernel_for(2).run.calls] == [2, 64]
    assert linear.kernels.kernel_for(2) is linear.kernels.kernel_for(64)


def test_no_rows_launch_nothing(weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    assert linear(torch.empty(0, 4)).shape == (0, 6)
    assert not linear.kernels.kernel_for(1).run.calls


def test_more_rows_than_planned_are_refused(weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    with pytest.raises(KernelError, match=r"65 rows for a layer of 4 x 6 .* 64 at most"):
        linear(torch.empty(65, 4))


def test_bias_is_cast_and_added(weight):
    linear = Linear.build(
        selection(evolve(PROBLEM, bias=True)), {"weight": weight}, torch.arange(6).double(), device="cpu"
    )
    torch.testing.assert_close(linear(torch.zeros(2, 4)), torch.arange(6).float().expand(2, 6))


@pytest.mark.parametrize(("m", "fused"), [(1, True), (3, False)])
def test_a_residual_goes_to_kernels_that_take_it_and_is_added_for_the_others(m, fused, weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    x, residual = torch.randn(m, 4), torch.randn(m, 6)
    before = residual.clone()
    torch.testing.assert_close(linear(x, residual), x @ weight.t() + residual)
    assert torch.equal(residual, before)
    assert linear.kernels.kernel_for(m).run.calls[0][1] is fused


def test_strided_rows_give_the_same_as_their_copy(weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    wide = torch.randn(5, 9)
    torch.testing.assert_close(linear(wide[:, :4]), linear(wide[:, :4].contiguous()))


def test_workspace_is_zeroed_and_large_enough_for_every_m(weight):
    many = kernel_spec("made-up.many", MRange(2), workspace="made_up_plugin:workspace")
    kernels = BoundKernels(selection(many=many), device="cpu")
    scratch = kernels.kernel_for(2).workspace()
    assert scratch.numel() == 8 * 64 + 6
    assert not scratch.any()
    assert kernels.kernel_for(1).workspace() is None
    linear = Linear.build(kernels.selection, {"weight": weight}, device="cpu", kernels=kernels)
    linear(torch.zeros(2, 4))
    assert kernels.kernel_for(2).run.calls[0][2] is scratch


def test_warm_up_reaches_each_kernel_with_its_own_rows(weight):
    linear = Linear.build(selection(), {"weight": weight}, device="cpu")
    linear.kernels.warm_up([8, 1, 1, 64, 500, 0])
    assert linear.kernels.kernel_for(1).run.warmed == [1]
    assert linear.kernels.kernel_for(2).run.warmed == [8, 64]


def test_a_kernel_that_cannot_be_made_is_named_with_its_distribution():
    broken = kernel_spec("made-up.many", MRange(2), factory="made_up_plugin:Broken")
    with pytest.raises(PluginError, match=r"made-up\.many.*made-up-dist 1\.0.*no such instruction"):
        BoundKernels(selection(many=broken), device="cpu")


def test_bytes_count_weights_and_bias(weight):
    plain = Linear.build(selection(), {"weight": weight}, device="cpu")
    biased = Linear.build(selection(evolve(PROBLEM, bias=True)), {"weight": weight}, torch.zeros(6), device="cpu")
    assert (plain.nbytes, biased.nbytes) == (96, 120)
