"""What a launch tells the driver, byte for byte, seen by a stand-in for the driver's entry point."""

import ctypes

import pytest

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels import mma_linear, struct_launch
from deepinfer_core.kernels.struct_launch import StructLaunch


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig as cuda.h has it."""

    _fields_ = (
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Args(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_int))


@pytest.fixture
def launches(monkeypatch):
    seen = []

    class Driver:
        status = 0

        @staticmethod
        def cuLaunchKernelEx(config, function, parameters, extra):  # noqa: N802
            found = LaunchConfig.from_address(ctypes.addressof(config._obj))
            ids = [ctypes.c_int.from_address(found.attributes + 72 * i).value for i in range(found.count)]
            values = [(ctypes.c_uint * 3).from_address(found.attributes + 72 * i + 8)[:] for i in range(found.count)]
            grid = (found.gridx, found.gridy, found.gridz)
            block = (found.blockx, found.blocky, found.blockz)
            argument = ctypes.string_at(parameters[0], ctypes.sizeof(Args))
            seen.append((grid, block, found.shared, found.stream, list(zip(ids, values, strict=True)), argument))
            return Driver.status

    monkeypatch.setattr(struct_launch, "_driver", lambda: Driver)
    return seen, Driver


@pytest.mark.parametrize(
    ("dependent", "cluster", "attributes"),
    [
        (False, 1, []),
        (True, 1, [(6, [1, 0, 0])]),
        (True, 4, [(6, [1, 0, 0]), (4, [1, 4, 1])]),
        (False, 2, [(4, [1, 2, 1])]),
    ],
)
def test_the_driver_gets_grid_stream_attributes_and_the_struct_as_it_is_now(launches, dependent, cluster, attributes):
    seen, _ = launches
    args = Args(a=1, b=2)
    launch = StructLaunch(7, (3, 4, 5), 96, 1000, args, dependent=dependent, cluster=cluster)
    launch(11)
    args.b = 5
    launch(12)
    assert seen[0][:5] == ((3, 4, 5), (96, 1, 1), 1000, 11, attributes)
    assert seen[0][5] == bytes(Args(a=1, b=2))
    assert seen[1][3] == 12
    assert seen[1][5] == bytes(Args(a=1, b=5))


def test_a_refusal_is_an_error_with_the_grid(launches):
    _, driver = launches
    driver.status = 9
    with pytest.raises(KernelError, match=r"error 9; grid \(3, 4, 5\)"):
        StructLaunch(7, (3, 4, 5), 96, 0, Args(), dependent=False)(0)


@pytest.mark.parametrize("kind", [mma_linear._StreamArgs, mma_linear._TileArgs])
def test_the_one_write_of_a_call_fills_the_fields_it_should_and_no_other(kind):
    args = kind(tiles16=1, units=2, cut0=3, cut1=4)
    mma_linear._PER_CALL.pack_into(args, 0, *range(11, 23))
    names = ("codes", "groups", "x", "y", "bias", "residual", "part", "ticket", "m", "n", "k", "ldx")
    assert [getattr(args, name) for name in names] == list(range(11, 23))
    assert (args.tiles16, args.units, args.cut0, args.cut1) == (1, 2, 3, 4)
