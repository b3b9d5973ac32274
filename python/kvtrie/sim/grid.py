"""Grid: all combinations of the values of some settings, as configs.

Invariant: every config is checked, including its machines and the first request of its trace,
before any run. Cost: a config per combination.
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
    """A combination of settings.

    Attributes:
        values: changed settings by key.
        config: settings of the run.
        document: the same settings as the tables of a file.
    """

    values: dict[str, Any]
    config: SimulationConfig
    document: dict[str, Any]


def grid(
    path: Path, changes: Iterable[str], over: Iterable[str], option: str = "--over"
) -> list[Cell]:
    """Return all combinations of values. The last key changes first.

    Args:
        path: settings file.
        changes: `KEY=VALUE` changes for all combinations.
        over: `KEY=VALUE,VALUE` axes.
        option: name of the option for `over`, in errors.

    Raises:
        ConfigError: invalid settings, or too many combinations.
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
    """Return a function creating checked cells of a settings file from values by key.

    Args:
        path: settings file.
        changes: `KEY=VALUE` changes for all cells.
        option: name of the option with the values, for errors.

    Raises:
        ConfigError: an unreadable file, or an invalid change.
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
    """Create the machines and read the start of each trace, to find errors before any run.

    Raises:
        ConfigError: the error at the start of a run.
    """
    begun: set[tuple[object, int]] = set()
    for config in configs:
        open_simulation(config)
        trace = (config.trace, config.block_tokens)
        if trace not in begun:
            begun.add(trace)
            skipped = Skipped() if config.trace.lenient else None
            next(iter(trace_requests(*trace, skipped, config.most_blocks)), None)
