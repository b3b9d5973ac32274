"""The picture of a fusion: tokens × layers, marked as computed or reused.

Cost: half a second.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.canvas import figure, save

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.fuse.log import FusionLog

__all__ = ["draw_fusion"]

_KINDS = ("prefix", "reused", "reused, exact", "computed again", "query")
_COLOURS = ("#b9d9b4", "#d6e6f5", "#8fbce6", "#c0392b", "#999999")
_INK = "#333333"


def draw_fusion(path: Path, title: str, log: FusionLog) -> None:
    """Write the picture in the format of the path's ending.

    Args:
        path: the file.
        title: a line above it.
        log: of the fusion.

    Raises:
        ConfigError: the file is unwritable.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    first, stop = log.span
    codes = np.full(log.grid.shape, 1, dtype=np.int8)
    codes[:, :first], codes[:, stop:] = 0, 4
    at, borders, middles = first, [first], list[float]()
    for chunk in log.chunks:
        if chunk.exact:
            codes[:, at : at + chunk.tokens] = 2
        middles.append(at + (chunk.tokens - 1) / 2)
        at += chunk.tokens
        borders.append(at)
    codes[:, first:stop][log.grid[:, first:stop]] = 3
    drawn = figure(title, 4.8)
    axis: Any = drawn.subplots()
    axis.imshow(
        codes,
        cmap=ListedColormap(list(_COLOURS)),
        vmin=-0.5,
        vmax=len(_COLOURS) - 0.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    for border in borders:
        axis.axvline(border - 0.5, color="white", linewidth=1.5)
    axis.set_xticks(
        middles, [f"chunk {at}\n{chunk.state}" for at, chunk in enumerate(log.chunks, 1)]
    )
    axis.tick_params(length=0)
    axis.set_ylabel("layer")
    axis.spines[:].set_visible(False)
    seen = sorted({int(code) for code in np.unique(codes)})
    patches = [Patch(color=_COLOURS[code], label=_KINDS[code]) for code in seen]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(seen), frameon=False)
    save(drawn, path)
