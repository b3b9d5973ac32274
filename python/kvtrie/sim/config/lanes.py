"""Table `lanes`: measured lanes for tiers without lane settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.input import read_text, toml_of
from kvtrie.settings.argument import shown
from kvtrie.settings.tier import Lane
from kvtrie.sim.config.table import made

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["lanes_of"]


def lanes_of(table: Table, folder: Path = Path()) -> dict[str, Lane]:
    """Return the lanes of a `kvtrie profile` file, by name (`host read`). Empty without a path.

    A relative path starts at `folder` if the file exists there.

    Raises:
        ConfigError: an unreadable file, or a file without lanes.
    """
    given = table.take("path")
    table.close()
    if given is None:
        return {}
    if not isinstance(given, str) or not given:
        raise ConfigError(f"lanes.path is {shown(given)}, the name of a file wanted")
    path = folder / given
    path = path if path.exists() else Path(given)
    text = read_text(path, "the profile")
    rows: Any = toml_of(text, f"{path} is no profile of `kvtrie profile`").get("lanes")
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(f"{path} has no lanes: it is no profile of `kvtrie profile`")
    lanes: dict[str, Lane] = {}
    for name, figures in cast("dict[str, Any]", rows).items():
        row = cast("dict[str, Any]", figures) if isinstance(figures, dict) else {}
        some = {key: row[key] for key in ("bytes_per_s", "latency_ns") if key in row}
        lanes[name] = made(f"{path}, lanes.{name}", Lane, {"name": name, **some})
    return lanes
