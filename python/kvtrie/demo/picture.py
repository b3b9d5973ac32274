"""The demo's picture: fill of the tiers over time, and final residency of all layers.

Cost: about a second, once, after the last turn.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.canvas import INK, TIER_COLOURS, figure, save
from kvtrie.demo.residency import DROPPED
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["draw", "draw_map"]

_TIERS = tuple(TIER_COLOURS)
_COLOURS = (*TIER_COLOURS.values(), "#f2ddd0")  # of the tiers, then dropped
_GONE = len(_TIERS)
_SMALL: dict[str, Any] = {"color": INK, "fontsize": 11}


def draw(
    path: Path,
    title: str,
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    grids: Sequence[NDArray[np.int8]],
) -> None:
    """Write timeline and map as a picture in the format of the path's ending.

    Args:
        path: the file.
        title: a line above both.
        shares: after each turn, blocks on each of the tiers and, last, dropped.
        names: of the conversations.
        grids: per conversation, `(layers, blocks)` of tier numbers, from `residency.grid`.

    Raises:
        ConfigError: the file is unwritable.
    """
    drawn = figure(title, 7.2)
    axes: Any = drawn.subplots(2, 1, height_ratios=(1, 1.5))
    _timeline(axes[0], shares)
    _map(axes[1], names, grids)
    axes[1].set_title("Which layers of which blocks are where, after the last turn", **_SMALL)
    save(drawn, path)


def draw_map(
    path: Path, title: str, names: Sequence[str], grids: Sequence[NDArray[np.int8]]
) -> None:
    """Write the map alone, with a legend of its tiers. Arguments as in `draw`.

    Raises:
        ConfigError: the file is unwritable, or there is nothing to draw.
    """
    from matplotlib.patches import Patch

    if not any(each.size for each in grids):
        raise ConfigError("there is no session with a block to draw")
    drawn = figure(title, 4.8)
    axis: Any = drawn.subplots()
    _map(axis, names, grids)
    seen = sorted({int(code) for each in grids for code in np.unique(_codes(each))})
    labels = (*_TIERS, "dropped")
    patches = [Patch(color=_COLOURS[code], label=labels[code]) for code in seen]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(seen), frameon=False)
    save(drawn, path)


def _timeline(axis: Axes, shares: Sequence[Sequence[float]]) -> None:
    table = np.asarray(shares, dtype=float).T
    turns = list(range(1, len(shares) + 1))
    labels = (*_TIERS[: len(table) - 1], "dropped, recomputed if needed")
    colours = (*_COLOURS[: len(table) - 1], _COLOURS[_GONE])
    axis.stackplot(turns, table, colors=colours, labels=labels, step="mid", linewidth=0)
    axis.set(xlim=(turns[0], turns[-1]), xlabel="turn", ylabel="blocks")
    axis.set_title("Where the KV of all conversations is, after each turn", **_SMALL)
    axis.legend(loc="upper left", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _map(axis: Axes, names: Sequence[str], grids: Sequence[NDArray[np.int8]]) -> None:
    from matplotlib.colors import ListedColormap

    gap = np.full((grids[0].shape[0], 1), np.nan)
    columns: list[NDArray[np.floating[Any]]] = []
    middles: list[float] = []
    at = 0
    for each in grids:
        middles.append(at + (each.shape[1] - 1) / 2)
        at += each.shape[1] + 1
        columns += [_codes(each).astype(float), gap]
    axis.imshow(
        np.ma.masked_invalid(np.concatenate(columns[:-1], axis=1)),
        cmap=ListedColormap(list(_COLOURS)),
        vmin=-0.5,
        vmax=_GONE + 0.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    axis.set_xticks(middles, list(names))
    axis.tick_params(length=0)
    axis.set_ylabel("layer")
    axis.set_xlabel("blocks of each conversation, first to last")
    axis.spines[:].set_visible(False)


def _codes(where: NDArray[np.int8]) -> NDArray[np.int8]:
    return np.where(where == DROPPED, np.int8(_GONE), where)
