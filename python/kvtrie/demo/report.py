"""Report: the contents of a manager at a moment, as a small JSON file.

`kvtrie demo` and `kvtrie replay` write it. `kvtrie map` and `kvtrie stats` read it.
Invariant: capturing a report changes nothing, and a read report is checked.
Cost: a lookup per session, about one byte per block and layer on disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie.demo.residency import DROPPED, grid
from kvtrie.errors import ConfigError
from kvtrie.input import json_of, read_text
from kvtrie.output import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie import BlockManager

__all__ = ["Report", "capture", "read_report", "write_report"]

_FORMAT = "kvtrie report 1"
_GONE = "."


@dataclass(frozen=True, slots=True)
class Report:
    """Snapshot of a run: each block's tiers, and counters of each tier.

    Attributes:
        title: description of the run in one line.
        block_tokens: tokens of a block in the manager's settings.
        layers: layers of the model.
        tiers: per tier, fastest first, its counters under the names of `BlockManager.stats`.
        sessions: per session, int8 `(layers, blocks)`: the number of the fastest tier with the
            layer of the block, or -1.
        groups: if groups of layers are kept apart, a layer of each by the group's description.
    """

    title: str
    block_tokens: int
    layers: int
    tiers: dict[str, dict[str, int]]
    sessions: dict[str, NDArray[np.int8]]
    groups: dict[str, int] = field(default_factory=dict[str, int])


def capture(
    manager: BlockManager,
    title: str,
    sessions: Mapping[str, Sequence[int]],
    now: int,
) -> Report:
    """Capture a report.

    Args:
        manager: the manager.
        title: description of the run in one line.
        sessions: all tokens of each session for the map, by name.
        now: the time, in nanoseconds.
    """
    stats = manager.stats().as_dict()
    separate_groups = any(tier["groups"] for tier in stats["tiers"].values())
    groups = manager.model.groups if separate_groups else ()
    return Report(
        title=title,
        block_tokens=manager.block_tokens,
        layers=manager.model.layers,
        tiers={kind: _counters(tier) for kind, tier in stats["tiers"].items()},
        sessions={name: grid(manager, tokens, now) for name, tokens in sessions.items()},
        groups={group.identity(): group.layers[0] for group in groups},
    )


def _counters(tier: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in tier.items() if isinstance(value, int)}


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON. A layer of a session is a text with a character per block.

    Raises:
        ConfigError: the file is unwritable.
    """
    document = {
        "format": _FORMAT,
        "title": report.title,
        "block_tokens": report.block_tokens,
        "layers": report.layers,
        "tiers": report.tiers,
        "sessions": {name: _texts(each) for name, each in report.sessions.items()},
        "groups": report.groups,
    }
    write_output(path, json.dumps(document, indent=1) + "\n")


def read_report(path: Path) -> Report:
    """Read a report of `write_report`.

    Raises:
        ConfigError: the file is unreadable or no report.
    """
    document = json_of(read_text(path, "the report"), f"{path} is no report of kvtrie")
    if not isinstance(document, dict) or cast("Any", document).get("format") != _FORMAT:
        raise ConfigError(f"{path} is no report of kvtrie: it does not say {_FORMAT!r}")
    fields = cast("dict[str, Any]", document)
    try:
        tiers = {
            str(kind): {str(name): int(number) for name, number in counters.items()}
            for kind, counters in fields["tiers"].items()
        }
        layers = int(fields["layers"])
        return Report(
            title=str(fields["title"]),
            block_tokens=int(fields["block_tokens"]),
            layers=layers,
            tiers=tiers,
            sessions={
                str(name): _grid(texts, layers, len(tiers))
                for name, texts in fields["sessions"].items()
            },
            groups=_groups(fields["groups"], layers),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path} is a broken report of kvtrie: {error!r}") from error


def _texts(where: NDArray[np.int8]) -> list[str]:
    return ["".join(_GONE if tier == DROPPED else str(tier) for tier in row) for row in where]


def _groups(given: dict[str, Any], layers: int) -> dict[str, int]:
    """Parse a layer of each group."""
    groups = {str(name): int(layer) for name, layer in given.items()}
    if any(not 0 <= layer < layers for layer in groups.values()):
        raise ValueError(f"groups of layers {sorted(groups.values())} of {layers}")
    return groups


def _grid(texts: list[str], layers: int, tiers: int) -> NDArray[np.int8]:
    """Parse the texts of a session into its grid."""
    if len(texts) != layers or len({len(text) for text in texts}) != 1:
        raise ValueError(f"a session with {len(texts)} uneven rows of {layers}")
    rows = [[DROPPED if mark == _GONE else int(mark) for mark in text] for text in texts]
    where = np.array(rows, dtype=np.int8).reshape(layers, len(texts[0]))
    if where.size and where.max() >= tiers:
        raise ValueError(f"tier {where.max()} of {tiers}")
    return where
