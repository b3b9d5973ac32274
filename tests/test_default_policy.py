"""Every entry point that names no policy or objective has the one of `BlockManager`."""

from __future__ import annotations

import argparse
import inspect

import pytest

from kvtrie import BlockManager
from kvtrie._kvtrie import Simulation
from kvtrie.cli.replay import add_tiers
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError
from kvtrie.settings.tier import DEFAULT_POLICY
from kvtrie.sim.config.manager import manager_of
from kvtrie.sim.config.table import Table
from kvtrie.sim.replay import open_manager

SIGNATURE = inspect.signature(BlockManager).parameters


def default_of_the_command_line():
    parser = argparse.ArgumentParser()
    add_tiers(parser)
    return parser.parse_args([]).policy


@pytest.mark.parametrize(
    "found",
    [
        DEFAULT_POLICY,
        Settings.read({}).policy,
        manager_of(Table("manager", {}))["policy"],
        inspect.signature(open_manager).parameters["policy"].default,
        inspect.signature(Simulation).parameters["policy"].default,
        default_of_the_command_line(),
    ],
)
def test_the_default_policy_is_the_managers(found):
    assert found == SIGNATURE["policy"].default == "learned"


def test_the_objective_is_a_setting_of_the_connector():
    assert Settings.read({}).objective == SIGNATURE["objective"].default == "cost"
    assert Settings.read({"objective": "hits"}).objective == "hits"
    for given in ("speed", 3, None, ["hits"]):
        with pytest.raises(ConfigError, match="objective is one of cost, balanced, hits"):
            Settings.read({"objective": given})
