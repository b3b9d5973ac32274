"""Canvas: an empty picture in the project's style, and its output.

Cost: matplotlib is loaded with the first picture.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.output import write_output

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

__all__ = ["INK", "TIER_COLOURS", "figure", "save"]

INK = "#333333"
TIER_COLOURS = {"gpu": "#1b4f8a", "host": "#8fbce6", "disk": "#b9d9b4", "remote": "#d9cde8"}


def figure(title: str, height: float) -> Figure:
    """Return an empty picture of `height` inches, drawn without a screen.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; pictures need: pip install 'kvtrie[cli]'"
        ) from error
    drawn = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, color=INK)
    return drawn


def save(drawn: Figure, path: Path) -> None:
    """Write a picture in the format of the path's ending, or PNG without an ending.

    Raises:
        ConfigError: the file cannot be written.
    """
    picture = io.BytesIO()
    try:
        drawn.savefig(picture, dpi=110, format=path.suffix.removeprefix(".") or None)
    except ValueError as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error
    write_output(path, picture.getvalue())
