"""A policy plugin that breaks the contract is named, with its distribution."""

import pytest
from attrs import evolve

from deepinfer_core.assemble import choose_policy
from deepinfer_core.config import Config, SchedulerConfig
from deepinfer_core.errors import PluginError
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.discovery import discover


def test_options_that_are_no_attrs_class_are_the_plugins_fault() -> None:
    catalog = Catalog.from_discovery(discover())
    serial = catalog.policy("serial")
    broken = evolve(serial, spec=evolve(serial.spec, options="math:sqrt"))
    with pytest.raises(
        PluginError, match=r"'serial' \(deepinfer-plugin-policies .*math:sqrt.* must name an attrs class"
    ):
        choose_policy(
            Config(scheduler=SchedulerConfig(policy="serial")),
            evolve(catalog, policies={"serial": broken}),
            lambda key: key,
        )
