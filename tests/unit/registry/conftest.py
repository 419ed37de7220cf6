"""Fake distributions on sys.path, and short builders of descriptors and catalogs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_core.plugin_api import (
    AttentionBackendSpec,
    LinearBackend,
    LinearKernelSpec,
    LinearProblem,
    MRange,
    SchedulingPolicySpec,
    WeightLayoutSpec,
    WeightSchemeSpec,
)
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.discovery import Discovery, LoadedPlugin, PluginFault

HEADER = "from deepinfer_core.plugin_api import *\n"
INFO = "@hookimpl\ndef deepinfer_plugin_info():\n    return PluginInfo(name={name!r})\n"


class FakeDistributions:
    """Writes dist-info folders and modules into a folder that stands on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def add(
        self,
        name: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        folder: Path | None = None,
        form: str = "dist-info",
    ) -> None:
        """Install a distribution: entry points by name, module sources by module name."""
        root = folder or self.folder
        root.mkdir(exist_ok=True)
        info = root / (f"{name}-{version}.dist-info" if form == "dist-info" else f"{name}.egg-info")
        info.mkdir()
        (info / ("METADATA" if form == "dist-info" else "PKG-INFO")).write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
        )
        lines = "".join(f"{entry} = {value}\n" for entry, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[deepinfer.plugins]\n{lines}", encoding="utf-8")
        for module, source in (modules or {}).items():
            (root / f"{module}.py").write_text(source, encoding="utf-8")
            self.modules.add(module)

    def good(self, name: str, *, entry: str | None = None, module: str | None = None) -> None:
        """Install a plugin that works and registers one kernel, scheme and layout under its own name."""
        self.add(name, {entry or name: module or name}, {module or name: self.source(name)})

    @staticmethod
    def source(name: str, body: str = "") -> str:
        """Return a module that registers a linear backend of that name; ``body`` replaces its hooks but info."""
        hooks = body or (
            "@hookimpl\ndef deepinfer_linear_backends():\n"
            f"    kernel = LinearKernelSpec(name='{name}.gemv', scheme='{name}', layout='{name}.v1', device='cpu',"
            " factory='a:b')\n"
            f"    return [LinearBackend(name='{name}', kernels=(kernel,))]\n"
        )
        return HEADER + INFO.format(name=name) + hooks

    def entry_points(self) -> list[metadata.EntryPoint]:
        """Return the entry points of these distributions alone, without those of the environment."""
        found = [e for d in metadata.distributions(path=[str(self.folder)]) for e in d.entry_points]
        return [e for e in found if e.group == "deepinfer.plugins"]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDistributions]:
    folder = tmp_path / "site"
    folder.mkdir()
    made = FakeDistributions(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def kernel(name: str = "w.k", m: MRange | None = None, **changes: Any) -> LinearKernelSpec:
    values: dict[str, Any] = {"scheme": "w", "layout": "w.v1", "device": "cuda", "factory": "fake:Kernel"}
    return LinearKernelSpec(name=name, m=m or MRange(1), **(values | changes))


def layout(name: str = "w.v1", **changes: Any) -> WeightLayoutSpec:
    values: dict[str, Any] = {"scheme": "w", "factory": "fake:Layout", "devices": ("cuda", "cpu")}
    return WeightLayoutSpec(name=name, **(values | changes))


def scheme(name: str = "w") -> WeightSchemeSpec:
    return WeightSchemeSpec(name=name, bits=4, tensors=(), factory="fake:Scheme", group_sizes=(32, 128), zeros=True)


def attention(name: str, **changes: Any) -> AttentionBackendSpec:
    values: dict[str, Any] = {"devices": ("cuda",), "factory": "fake:Attention"}
    return AttentionBackendSpec(name=name, **(values | changes))


def plugin(name: str, *backends: LinearBackend, **changes: Any) -> LoadedPlugin:
    values: dict[str, Any] = {"distribution": f"dist-{name}", "version": "1.0", "entry_point": f"{name} = {name}"}
    return LoadedPlugin(name=name, backends=backends, **(values | changes))


def policy(name: str) -> SchedulingPolicySpec:
    return SchedulingPolicySpec(name=name, description="a policy", lanes=(), factory="fake:Policy")


def catalog(*plugins: LoadedPlugin, faults: tuple[PluginFault, ...] = ()) -> Catalog:
    return Catalog.from_discovery(Discovery(plugins=plugins, faults=faults))


def of_kernels(*kernels: LinearKernelSpec, layouts: tuple[WeightLayoutSpec, ...] | None = None) -> Catalog:
    """Return a catalog with one plugin ``w`` that has the scheme, the layout and these kernels."""
    parts = layouts if layouts is not None else (layout(),)
    return catalog(plugin("w", LinearBackend(name="w", schemes=(scheme(),), layouts=parts, kernels=kernels)))


def fault(name: str, error: BaseException, **changes: Any) -> PluginFault:
    values: dict[str, Any] = {"distribution": name, "version": "1.0", "stage": "load", "cause": str(error)}
    return PluginFault(name=name, error=error, **(values | changes))


def problem(**changes: Any) -> LinearProblem:
    values: dict[str, Any] = {
        "n": 64, "k": 128, "m_max": 64, "device": "cuda", "capability": (8, 6), "scheme": "w", "group_size": 32,
    }  # fmt: skip
    return LinearProblem(**(values | changes))


@pytest.fixture(scope="session")
def build() -> SimpleNamespace:
    functions: tuple[Callable[..., Any], ...] = (
        kernel, layout, scheme, attention, plugin, policy, catalog, of_kernels, fault, problem,
    )  # fmt: skip
    return SimpleNamespace(**{function.__name__: function for function in functions})
