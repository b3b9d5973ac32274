"""Plots of simulations: hits by room, time by cost, tiers over time, comparison of runs.

Cost: about a second each.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.canvas import INK, TIER_COLOURS, figure, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["draw_advice", "draw_hits", "draw_ratios", "draw_savings", "draw_tiers", "draw_times"]

_COLOURS = ("#1b4f8a", "#c0392b", "#3c8d40", "#8e5ea2", "#d98c21", "#777777")
_MOST_SAMPLES = 2000
_NS_PER_S = 1e9
_FAR = 5


def draw_hits(
    path: Path,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    bound: Sequence[tuple[float, float]],
) -> None:
    """Plot the hit share by room in GiB, with the upper bound.

    Args:
        path: output file.
        title: title line.
        lines: ascending points `(GiB, share)` by label.
        bound: Belady's hits, as points.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = figure(title, 5.4)
    axis: Any = drawn.subplots()
    for colour, (name, points) in zip(_cycled(len(lines)), lines.items(), strict=True):
        axis.plot(*_columns(points), color=colour, label=name, marker=_marker(points))
    if bound:
        label = "most hits with this room (Belady)"
        axis.plot(*_columns(bound), color=INK, linestyle="--", linewidth=1, label=label)
    axis.set(xscale="log", xlabel="GiB of KV", ylabel="share of prompt blocks found")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(_labelled)
    axis.set_ylim(bottom=0)
    _finish(axis)
    save(drawn, path)


def draw_advice(
    path: Path,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    gpu: float,
    most: float,
) -> None:
    """Plot the share of found prompt tokens by GiB of host memory, between two limits.

    Args:
        path: output file.
        title: title line.
        lines: ascending points `(GiB, share found on all tiers)` by label.
        gpu: share found by the GPU alone.
        most: share found by a cache of any size.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = figure(title, 5.4)
    axis: Any = drawn.subplots()
    for colour, (name, points) in zip(_cycled(len(lines)), lines.items(), strict=True):
        axis.plot(*_columns(points), color=colour, label=name, marker="o")
    axis.axhline(most, color=INK, linestyle="--", linewidth=1, label="a cache of any size")
    axis.axhline(gpu, color=INK, linewidth=1, label="the GPU alone")
    axis.set(xscale="log", xlabel="GiB of host memory", ylabel="share of prompt tokens found")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(_labelled)
    axis.set_ylim(bottom=0)
    _finish(axis)
    save(drawn, path)


def draw_savings(
    path: Path, title: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    """Plot the cost share saved by policies by room. The last policy knows the future.

    Args:
        path: output file.
        title: title line.
        lines: ascending points `(blocks, share)` by policy.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = figure(title, 5.4)
    axis: Any = drawn.subplots()
    for at, (name, points) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": _COLOURS[at % len(_COLOURS)], "marker": "o"}
        if at == len(lines) - 1:
            style = {"color": INK, "linestyle": "--", "linewidth": 1}
        axis.plot(*_columns(points), label=name, **style)
    axis.set(xscale="log", xlabel="room in blocks", ylabel="share of the cost saved")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(_labelled)
    axis.set_ylim(bottom=0)
    _finish(axis)
    save(drawn, path)


def draw_times(
    path: Path,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    across: str,
) -> None:
    """Plot TTFT by the cost of a run, with the median on the left and p99 on the right.

    Args:
        path: output file.
        title: title line.
        lines: ascending points `(cost, p50 in ms, p99 in ms)` by label.
        across: label of the x axis.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = figure(title, 5.4)
    axes: Any = drawn.subplots(1, 2)
    for at, (axis, part) in enumerate(zip(axes, ("median", "p99"), strict=True)):
        for colour, (name, points) in zip(_cycled(len(lines)), lines.items(), strict=True):
            pairs = [(point[0], point[1 + at]) for point in points]
            axis.plot(*_columns(pairs), color=colour, marker="o", label=name)
        axis.set(xlabel=across, ylabel=f"ms to the first token, {part}")
        _finish(axis)
    save(drawn, path)


def draw_tiers(
    path: Path,
    title: str,
    kinds: Sequence[str],
    rooms: Sequence[int],
    samples: Sequence[tuple[int, int, Sequence[int]]],
) -> None:
    """Plot the occupancy of each tier over time, over all machines.

    Args:
        path: output file.
        title: title line.
        kinds: kinds of the tiers.
        rooms: blocks of the tiers, over all machines.
        samples: `(at_ns, machine, blocks by tier)` of `Simulation.samples`.

    Raises:
        ConfigError: the file cannot be written.
    """
    # All machines are sampled at the same times, so each time is a row.
    times = np.array(sorted({at for at, _, _ in samples}), dtype=np.int64)
    place = {at: row for row, at in enumerate(times.tolist())}
    blocks = np.zeros((len(times), len(kinds)))
    for at, _, resident in samples:
        blocks[place[at]] += resident
    every = -(-len(times) // _MOST_SAMPLES) or 1
    drawn = figure(title, 1.4 + 2.0 * len(kinds))
    axes: Any = drawn.subplots(len(kinds), 1, sharex=True, squeeze=False)
    for tier, (kind, room) in enumerate(zip(kinds, rooms, strict=True)):
        axis = axes[tier, 0]
        seconds, shown = times[::every] / _NS_PER_S, blocks[::every, tier]
        axis.fill_between(seconds, shown, step="post", color=TIER_COLOURS[kind], linewidth=0)
        axis.axhline(room, color=INK, linestyle="--", linewidth=1)
        axis.set_title(f"room for {room} blocks", fontsize=10, color=INK, loc="right")
        axis.set(ylabel=f"blocks on {kind}")
        axis.set_ylim(0, max(1.1 * max(shown, default=0), 1.0))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds of the trace")
    save(drawn, path)


def draw_ratios(
    path: Path, title: str, runs: Sequence[str], ratios: Sequence[Mapping[str, float | None]]
) -> None:
    """Plot each figure of each run relative to the first run, as bars.

    Args:
        path: output file.
        title: title line.
        runs: names of the runs.
        ratios: ratios of each run, by figure.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = [name for name in ratios[0] if any(row[name] is not None for row in ratios)]
    drawn = figure(title, 5.4)
    axis: Any = drawn.subplots()
    places, width = np.arange(len(names)), 0.8 / len(runs)
    for at, (colour, run, row) in enumerate(zip(_cycled(len(runs)), runs, ratios, strict=True)):
        heights = [np.nan if (ratio := row[name]) is None else ratio for name in names]
        left = places + (at - (len(runs) - 1) / 2) * width
        drop = [height - 1 for height in heights]
        axis.bar(left, drop, width * 0.92, bottom=1, color=colour, label=run)
    seen = [ratio for row in ratios for name in names if (ratio := row[name])]
    if max(seen, default=1) > _FAR * min(seen, default=1):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    axis.axhline(1, color=INK, linewidth=1)
    axis.set_xticks(places, [name.replace("_", " ") for name in names])
    axis.set_ylabel(f"ratio to {runs[0]}")
    _finish(axis)
    save(drawn, path)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _marker(points: Sequence[tuple[float, float]]) -> str:
    """Return a marker for short lines only."""
    return "o" if len(points) < len(_COLOURS) * 4 else ""


def _labelled(x: float, _: object) -> str:
    """Return the label of a minor tick on a logarithmic axis: 2 and 5 of each decade."""
    return f"{x:g}" if f"{x:e}"[0] in "25" else ""


def _cycled(number: int) -> list[str]:
    return [_COLOURS[at % len(_COLOURS)] for at in range(number)]


def _finish(axis: Any) -> None:  # noqa: ANN401 - an Axes
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.legend(frameon=False)
