"""The demo's picture: how the tiers filled over time, and which layers of what ended up where.

Cost: about a second, once, after the last turn.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.demo.residency import DROPPED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["draw"]

_COLOURS = ("#1b4f8a", "#8fbce6", "#f2ddd0")  # gpu, host, dropped
_INK = "#333333"


def draw(
    path: Path,
    title: str,
    shares: Sequence[Sequence[float]],
    grids: Sequence[NDArray[np.int8]],
) -> None:
    """Write the picture as a file of the kind that `path` ends in.

    Args:
        path: where to write.
        title: one line above it all.
        shares: after each turn, blocks on each of the two tiers and dropped.
        grids: per conversation, `(layers, blocks)` of tier numbers, as `residency.grid` gives it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 1, height_ratios=(1, 1.5))
    figure.suptitle(title, color=_INK)
    _timeline(axes[0], shares)
    _map(axes[1], grids)
    figure.savefig(path, dpi=110)


def _timeline(axis: Axes, shares: Sequence[Sequence[float]]) -> None:
    table = np.asarray(shares, dtype=float).T
    turns = list(range(1, len(shares) + 1))
    labels = ("gpu", "host", "dropped, recomputed if needed")
    axis.stackplot(turns, table, colors=_COLOURS, labels=labels, step="mid", linewidth=0)
    axis.set(xlim=(turns[0], turns[-1]), xlabel="turn", ylabel="blocks of 16 tokens")
    axis.set_title("Where the KV of all conversations is, after each turn", color=_INK, fontsize=11)
    axis.legend(loc="upper left", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _map(axis: Axes, grids: Sequence[NDArray[np.int8]]) -> None:
    from matplotlib.colors import ListedColormap

    layers = grids[0].shape[0]
    gap = np.full((layers, 1), np.nan)
    columns: list[NDArray[np.floating[Any]]] = []
    middles: list[float] = []
    at = 0
    for each in grids:
        codes = np.where(each == DROPPED, len(_COLOURS) - 1, each).astype(float)
        middles.append(at + (codes.shape[1] - 1) / 2)
        at += codes.shape[1] + 1
        columns += [codes, gap]
    image = np.concatenate(columns[:-1], axis=1)
    axis.imshow(
        np.ma.masked_invalid(image),
        cmap=ListedColormap(list(_COLOURS)),
        vmin=-0.5,
        vmax=len(_COLOURS) - 0.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    axis.set_xticks(middles, [f"chat {number}" for number in range(1, len(grids) + 1)])
    axis.tick_params(length=0)
    axis.set_ylabel("layer")
    axis.set_xlabel("blocks of each conversation, first to last")
    axis.set_title(
        "Which layers of which blocks are where, after the last turn", color=_INK, fontsize=11
    )
    axis.spines[:].set_visible(False)
