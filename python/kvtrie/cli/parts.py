"""Parts: the stores of the groups of layers of one model, which `kvtrie disk gc` takes together.

A window or a state serves no resume point without the block of the first group, and a store is in
use as long as one of its model's is. Invariant: nothing changes. Cost: the manifests of all stores.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrie._kvtrie import DiskStore
from kvtrie.cli import kept_file
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvtrie.cli.found import Row

__all__ = ["Part", "parts"]


class Part(NamedTuple):
    """What the stores of the other groups of its model say of a store.

    Attributes:
        age: nanoseconds since the last use of a block in any of them; None without a block.
        keys: content keys of the first group's blocks; None for that group's own store.
    """

    age: int | None
    keys: frozenset[bytes] | None


def parts(found: Iterable[Path], wall: int) -> dict[Path, Part]:
    """The stores of groups of layers, with ages as of `wall`, in nanoseconds.

    Without a readable store of the first group nothing is concluded from the others.
    """
    models: dict[str, dict[int, tuple[Path, list[Row]]]] = {}
    for store in found:
        if kept_file.is_file(store):
            continue
        try:
            with closing(DiskStore.inspect(store)) as seen:
                model, group = _model(seen.about)
                if group is not None:
                    models.setdefault(model, {})[group] = (store, seen.blocks(wall))
        except KvtrieError:
            continue
    known: dict[Path, Part] = {}
    for groups in models.values():
        if 0 not in groups:
            continue
        age = min((row[4] for _, rows in groups.values() for row in rows), default=None)
        keys = frozenset(row[1] for row in groups[0][1])
        known |= {store: Part(age, keys if group else None) for group, (store, _) in groups.items()}
    return known


def _model(about: str) -> tuple[str, int | None]:
    """The meaning of the stores of all groups of a model, and the group of this one, if any."""
    try:
        fields: dict[str, Any] = dict(json.loads(about))
    except (TypeError, ValueError, RecursionError):
        return about, None
    group = fields.pop("group", None)
    fields.pop("layout", None)  # that of its own rows
    return json.dumps(fields, sort_keys=True), group if isinstance(group, int) else None
