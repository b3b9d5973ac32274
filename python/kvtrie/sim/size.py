"""Size: the cheapest rooms meeting a run's goals.

Assumes that more room is never slower, so the least room along an axis is found by section. With
several axes, the section runs along the last axis for a grid over the remaining axes. The cheapest
point is then narrowed along each axis in turn until none improves. The result is a local optimum of
the tried rooms: along each axis, the largest smaller tried room misses a goal. A trade between two
rooms is only seen on the grid.
Cost: a run per tried room, three at a time, some ten to twenty per line of the grid.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import real, whole
from kvtrie.sim.grid import check
from kvtrie.sim.sweep import iter_sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.grid import Cell

__all__ = ["Axis", "Sized", "Sizes", "axis_of", "goal_of"]

_TIMES = ("ttft", "tpot", "e2e")
_PARTS = ("mean", "p50", "p90", "p99")
_AT_ONCE = 3
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Axis:
    """A room setting and its range.

    Attributes:
        name: settings key of the room, for example `tiers.1.blocks`.
        low: smallest value.
        high: largest value.
    """

    name: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Sized:
    """Rooms meeting the goals.

    Attributes:
        values: rooms by key.
        cost: money per hour, or GiB if the settings have no prices.
        figures: figures of the run with these rooms.
        below: by key, the largest smaller tried room with the remaining rooms unchanged. It misses
            a goal. None at the end of the range.
    """

    values: dict[str, int]
    cost: float
    figures: dict[str, Any]
    below: dict[str, int | None]


def axis_of(stated: str) -> Axis:
    """Return an axis from `KEY=LOW:HIGH`.

    Raises:
        ConfigError: a different format.
    """
    name, _, ends = stated.partition("=")
    low, colon, high = ends.partition(":")
    if not (name and colon and low.isdecimal() and high.isdecimal()):
        raise ConfigError(f"--over takes KEY=LOW:HIGH, not {stated!r}")
    least = whole(f"low end of {name}", int(low), 1, 2**62)
    return Axis(name, least, whole(f"high end of {name}", int(high), least, 2**62))


def goal_of(stated: str) -> tuple[str, float]:
    """Return a goal from `ttft_p99_ns=N`.

    Raises:
        ConfigError: an unknown figure, or not a number.
    """
    name, _, given = stated.partition("=")
    names = [f"{time}_{part}_ns" for time, part in itertools.product(_TIMES, _PARTS)]
    if name not in names:
        raise ConfigError(f"--goal is one of {', '.join(names)}, not {stated!r}")
    try:
        return name, real(f"--goal {name}", float(given), 0, 2.0**63)
    except ValueError as error:
        raise ConfigError(f"--goal {name} is {given!r}, a number wanted") from error


@dataclass(slots=True)
class Sizes:
    """A search for rooms.

    Attributes:
        make: creates a config from rooms, see `kvtrie.sim.grid.variation`.
        goals: maximum of each figure, by name.
        axes: rooms with their ranges.
        within: relative precision of the search along an axis.
        points: number of grid points on each axis but the last.
        results: as for `sweep`.
        on_run: called after each run.
        seen: figures by rooms.
    """

    make: Callable[[dict[str, Any]], Cell]
    goals: dict[str, float]
    axes: Sequence[Axis]
    within: float = 0.01
    points: int = 6
    results: Path | None = None
    on_run: Callable[[], object] = lambda: None
    seen: dict[tuple[int, ...], dict[str, Any]] = field(
        default_factory=dict[tuple[int, ...], dict[str, Any]]
    )

    def cheapest(self) -> Sized | None:
        """Return the cheapest rooms, or None if the largest rooms miss a goal.

        Raises:
            ConfigError: invalid settings.
        """
        lows, highs = tuple(a.low for a in self.axes), tuple(a.high for a in self.axes)
        check(self._config(ends) for ends in (lows, highs))
        if not self._meets(highs):
            return None
        best = highs
        lines = itertools.product(*(self._spaced(axis) for axis in self.axes[:-1]))
        for line in sorted(lines, key=lambda line: self._cost((*line, lows[-1]))):
            # Neither this line nor a later line can be cheaper.
            if self._cost((*line, lows[-1])) >= self._cost(best):
                break
            if self._meets((*line, highs[-1])):
                found = self._narrowed((*line, highs[-1]), len(self.axes) - 1)
                best = min(best, found, key=lambda rooms: (self._cost(rooms), rooms))
        while True:
            before = best
            for at in range(len(self.axes)):
                best = self._narrowed(best, at)
            if best == before:
                break
        names = [axis.name for axis in self.axes]
        below = {name: self._below(best, at) for at, name in enumerate(names)}
        values = dict(zip(names, best, strict=True))
        return Sized(values, self._cost(best), self.seen[best], below)

    def _narrowed(self, rooms: tuple[int, ...], at: int) -> tuple[int, ...]:
        """Return the least room of an axis meeting the goals. The given room meets them."""
        misses, meets = self.axes[at].low - 1, rooms[at]
        while meets - misses > max(1, int(meets * self.within)):
            gap = meets - misses
            inner = {misses + max(1, gap * part // (_AT_ONCE + 1)) for part in range(1, 4)}
            tried = sorted(one for one in inner if misses < one < meets)
            self._run([(*rooms[:at], one, *rooms[at + 1 :]) for one in tried])
            for one in tried:
                if self._meets((*rooms[:at], one, *rooms[at + 1 :])):
                    meets = one
                    break
                misses = one
        return (*rooms[:at], meets, *rooms[at + 1 :])

    def _below(self, rooms: tuple[int, ...], at: int) -> int | None:
        others = (*rooms[:at], *rooms[at + 1 :])
        tried = [seen[at] for seen in self.seen if (*seen[:at], *seen[at + 1 :]) == others]
        return max((one for one in tried if one < rooms[at]), default=None)

    def _spaced(self, axis: Axis) -> list[int]:
        """Return rooms at equal ratios."""
        ratio, steps = axis.high / axis.low, max(1, self.points - 1)
        return sorted({round(axis.low * ratio ** (at / steps)) for at in range(self.points)})

    def _config(self, rooms: tuple[int, ...]) -> SimulationConfig:
        named = zip((axis.name for axis in self.axes), rooms, strict=True)
        return self.make(dict(named)).config

    def _cost(self, rooms: tuple[int, ...]) -> float:
        config = self._config(rooms)
        hour = config.per_hour()
        return config.room_bytes() / _GIB if hour is None else hour

    def _run(self, wanted: Sequence[tuple[int, ...]]) -> None:
        new = [rooms for rooms in wanted if rooms not in self.seen]
        configs = [self._config(rooms) for rooms in new]
        for at, figures in iter_sweep(configs, results=self.results):
            self.seen[new[at]] = figures
            self.on_run()

    def _meets(self, rooms: tuple[int, ...]) -> bool:
        """Return whether all goals are met and no request was refused."""
        self._run([rooms])
        figures = self.seen[rooms]
        if figures["refused"]:
            return False
        for name, most in self.goals.items():
            time, part, _ = name.split("_")
            spread = figures[f"{time}_ns"]
            if spread is not None and spread[part] > most:
                return False
        return True
