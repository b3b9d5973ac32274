"""The arguments of a simulation, the same for each action."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from kvtrie.sim.config import SimulationConfig

__all__ = ["add_settings", "changes_in", "settings_of"]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings file, changes of its settings, and `--json`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the settings, a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a setting, as tiers.0.blocks=9, any number of times",
    )
    parser.add_argument(
        "--lenient", action="store_true", help="leave out invalid lines of the trace"
    )
    parser.add_argument(
        "--time-unit",
        metavar="UNIT",
        help="of timestamp in a Mooncake trace: s, ms, us or ns (default: by its first value)",
    )
    parser.add_argument(
        "--token-by-token",
        action="store_true",
        help="each token of an answer is a separate event, as engine.token_by_token=true",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def settings_of(given: argparse.Namespace) -> SimulationConfig:
    """Return the settings, checked.

    Raises:
        ConfigError: invalid settings.
    """
    from kvtrie.sim.config import read_config

    return read_config(given.config, changes_in(given))


def changes_in(given: argparse.Namespace) -> list[str]:
    """Return the changes of the file by arguments, `KEY=VALUE` each."""
    changes = list(given.set)
    if given.lenient:
        changes.append("trace.lenient=true")
    if given.time_unit is not None:
        changes.append(f"trace.time_unit={given.time_unit}")
    if given.token_by_token:
        changes.append("engine.token_by_token=true")
    return changes
