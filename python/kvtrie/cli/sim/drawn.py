"""The pictures of a grid of runs: hits over GiB, time over cost, ratios to the first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.grid import Cell

__all__ = ["draw_compared", "draw_swept", "labels_of"]

_GIB = 2**30
_NS_PER_MS = 1e6
_MOST_BOUNDS = 16


def labels_of(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the values of each cell as text."""
    return [
        [value if isinstance(value, str) else json.dumps(value) for value in cell.values.values()]
        for cell in cells
    ]


def draw_compared(
    folder: Path, cells: Sequence[Cell], ratios: Sequence[dict[str, float | None]]
) -> None:
    """Write `ratios.png`.

    Raises:
        ConfigError: the folder is unwritable.
    """
    from kvtrie.sim.pictures import draw_ratios

    runs = [", ".join(label) for label in labels_of(cells)]
    title = f"{cells[0].config.trace.path.name}: {', '.join(cells[0].values)}"
    draw_ratios(_made(folder) / "ratios.png", title, runs, ratios)


def draw_swept(folder: Path, cells: Sequence[Cell], figures: Sequence[dict[str, Any]]) -> None:
    """Write `hits.png`, and `times.png` if the settings have prices.

    Raises:
        ConfigError: the folder is unwritable.
    """
    from kvtrie.sim.pictures import draw_hits, draw_times

    hits: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float, float]]] = {}
    for cell, found in zip(cells, figures, strict=True):
        name, tokens = _line(cell), sum(found["hit_tokens"].values())
        share = tokens / max(1, tokens + found["computed_tokens"])
        hits.setdefault(name, []).append((_room(cell.config)[1], share))
        if found["cost"] is not None and found["ttft_ns"] is not None:
            spread = (found["ttft_ns"][part] / _NS_PER_MS for part in ("p50", "p99"))
            times.setdefault(name, []).append((found["cost"]["per_hour"], *spread))
    title = cells[0].config.trace.path.name
    lines = {name: sorted(points) for name, points in hits.items()}
    draw_hits(_made(folder) / "hits.png", title, lines, _bound([cell.config for cell in cells]))
    if times:
        ordered = {name: sorted(points) for name, points in times.items()}
        draw_times(folder / "times.png", title, ordered, "cost per hour")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


def _line(cell: Cell) -> str:
    """Return the settings common to all points of a cell's line: all but rooms."""
    rest = (
        f"{name}={label}"
        for name, label in zip(cell.values, labels_of([cell])[0], strict=True)
        if name.rpartition(".")[2] not in {"blocks", "bytes"}
    )
    return ", ".join(rest) or "simulated"


def _room(config: SimulationConfig) -> tuple[int, float]:
    """Return blocks and GiB of all tiers of all machines."""
    return sum(config.rooms()), config.room_bytes() / _GIB


def _bound(configs: Sequence[SimulationConfig]) -> list[tuple[float, float]]:
    """Return Belady's share of blocks for the rooms of configs with the same trace."""
    from kvtrie.sim.offline import most_hits
    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.requests import block_requests

    first = configs[0]
    played = {(config.trace, config.block_tokens) for config in configs}
    rooms = sorted({_room(config) for config in configs})
    # The order of clients' requests differs from run to run.
    clients = first.trace.clients is not None
    if len(played) > 1 or len(rooms) > _MOST_BOUNDS or clients:
        return []
    skipped = Skipped() if first.trace.lenient else None
    paths = list(block_requests(first.trace, first.block_tokens, skipped, first.most_blocks))
    least = max((len(path.blocks) for path in paths), default=0)
    requested = max(1, sum(len(path.blocks) for path in paths))
    return [
        (gib, most_hits(paths, blocks).hits / requested) for blocks, gib in rooms if blocks >= least
    ]
