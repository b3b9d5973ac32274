"""Grid: all combinations of some settings' values, each a config.

Invariant: every config is checked, with its machines and the first request of its trace, before one
of them runs. Cost: one config per combination.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.sim.config.document import change, put, read_document, values_of
from kvtrie.sim.config.simulation import config_of
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.run import open_simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvtrie.sim.config import SimulationConfig

__all__ = ["Cell", "check", "grid", "variation"]

_MOST_CELLS = 100_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination.

    Attributes:
        values: what it sets, by key.
        config: the settings with that.
        document: the same as the tables of a file.
    """

    values: dict[str, Any]
    config: SimulationConfig
    document: dict[str, Any]


def grid(
    path: Path, changes: Iterable[str], over: Iterable[str], option: str = "--over"
) -> list[Cell]:
    """Return the combinations of values, the last key's changing first.

    Args:
        path: a file of settings.
        changes: `KEY=VALUE` each, for all of them.
        over: `KEY=VALUE,VALUE` each.
        option: how an error names what `over` came from.

    Raises:
        ConfigError: settings that cannot be, or too many combinations.
    """
    make = variation(path, changes, option)
    axes: dict[str, list[Any]] = {}
    for stated in over:
        name, values = values_of(stated, option)
        if name in axes:
            raise ConfigError(f"{option} has {name} twice")
        axes[name] = values
    number = 1
    for values in axes.values():
        number *= len(values)
    if number > _MOST_CELLS:
        raise ConfigError(f"{option} makes {number} combinations, at most {_MOST_CELLS} wanted")
    product = itertools.product(*axes.values())
    cells = [make(dict(zip(axes, values, strict=True))) for values in product]
    check(cell.config for cell in cells)
    return cells


def variation(path: Path, changes: Iterable[str], option: str) -> Callable[[dict[str, Any]], Cell]:
    """Return a way to make cells of a file of settings: from values by key, which it checks.

    Args:
        path: the file.
        changes: `KEY=VALUE` each, for all of them.
        option: how an error names what the values came from.

    Raises:
        ConfigError: a file that cannot be read, or a change that cannot be.
    """
    document = read_document(path)
    for stated in changes:
        change(document, stated)

    def make(values: dict[str, Any]) -> Cell:
        changed = copy.deepcopy(document)
        for name, value in values.items():
            put(changed, name, value, f"{option} {name}={value}")
        return Cell(values, config_of(changed, path.parent), changed)

    return make


def check(configs: Iterable[SimulationConfig]) -> None:
    """Find errors that show only when the machines are made or the trace's head is read.

    Raises:
        ConfigError: what a run would begin with.
    """
    begun: set[tuple[object, int]] = set()
    for config in configs:
        open_simulation(config)
        trace = (config.trace, config.block_tokens)
        if trace not in begun:
            begun.add(trace)
            skipped = Skipped() if config.trace.lenient else None
            next(iter(trace_requests(*trace, skipped, config.most_blocks)), None)
