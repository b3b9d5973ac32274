"""Charts: a report as text, for the terminal.

Invariant: a line is never wider than its content needs, and nothing is coloured.
Cost: linear in the size of the chart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.demo.residency import DROPPED
from kvtrie.errors import ConfigError
from kvtrie.printable import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.demo.report import Report

__all__ = ["overview", "session_map", "tier_table"]

_MARKS = "█▓▒░"
_GONE = "·"
_COLUMNS = ("slots", "free", "hits", "misses", "clean", "demoted", "dropped", "moves", "failed")
_COUNTERS = {"clean": "evicted_clean", "demoted": "evicted_dirty"}


def overview(report: Report) -> str:
    """Return the map of all sessions: a row per session, a column per layer.

    A cell shows the tier with the layer of most of the session's blocks, the faster tier on a tie.
    The shares after it are of all layers of all blocks.
    """
    _wanted(report)
    kinds = [*report.tiers, "dropped"]
    names = {name: printable(name) for name in report.sessions}
    width = max(map(len, names.values()))
    head = f"{'':{width}} {'layers'[: report.layers]:{report.layers}} {'blocks':>6}"
    head += "".join(f"{printable(kind):>9}" for kind in kinds)
    lines = [printable(report.title), _legend(report), "", head]
    for name, where in report.sessions.items():
        counts = np.stack([(where == tier).sum(axis=1) for tier in _codes(report)])
        most: list[int] = counts.argmax(axis=0).tolist()
        row = "".join(_mark(_codes(report)[tier]) for tier in most)
        shares = counts.sum(axis=1) / max(1, where.size)
        cells = "".join(f"{share:9.0%}" for share in shares)
        lines.append(f"{names[name]:{width}} {row} {where.shape[1]:6d}{cells}")
    return "\n".join(lines)


def session_map(report: Report, name: str) -> str:
    """Return the map of a session: a row per layer, the last layer on top, and a column per block.

    If groups of layers are kept apart, a group has a single row: its layers have equal residency.

    Raises:
        ConfigError: an unknown session.
    """
    _wanted(report)
    if name not in report.sessions:
        raise ConfigError(
            f"there is no session {name!r} in the report, only {', '.join(report.sessions)}"
        )
    where: NDArray[np.int8] = report.sessions[name]
    title = f"{printable(report.title)}: {printable(name)}"
    if report.groups:
        width = max(len(printable(group)) for group in report.groups)
        groups = [
            f"{printable(group):{width}} {''.join(_mark(tier) for tier in where[layer])}"
            for group, layer in report.groups.items()
        ]
        return "\n".join([title, _legend(report), "", "group", *groups])
    rows = [
        f"{layer:5d} {''.join(_mark(tier) for tier in where[layer])}"
        for layer in reversed(range(report.layers))
    ]
    return "\n".join([title, _legend(report), "", "layer", *rows])


def tier_table(report: Report) -> str:
    """Return the counters of all tiers, a row per tier."""
    width = max(len("tier"), *(len(printable(kind)) for kind in report.tiers))
    lines = [
        printable(report.title),
        "",
        f"{'tier':{width}}" + "".join(f"{name:>10}" for name in _COLUMNS),
    ]
    for kind, counters in report.tiers.items():
        cells = (counters.get(_COUNTERS.get(name, name), 0) for name in _COLUMNS)
        lines.append(f"{printable(kind):{width}}" + "".join(f"{cell:10d}" for cell in cells))
    return "\n".join(lines)


def _wanted(report: Report) -> None:
    if not report.sessions:
        raise ConfigError(f"the report on {report.title!r} holds no session to draw")


def _codes(report: Report) -> list[int]:
    return [*range(len(report.tiers)), DROPPED]


def _mark(tier: int) -> str:
    return _GONE if tier == DROPPED else _MARKS[tier]


def _legend(report: Report) -> str:
    kinds = [f"{_mark(tier)} {printable(kind)}" for tier, kind in enumerate(report.tiers)]
    return "   ".join([*kinds, f"{_GONE} dropped"])
