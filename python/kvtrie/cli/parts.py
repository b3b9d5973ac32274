"""Parts: the stores of all groups of layers of a model, for a joint `kvtrie disk gc`.

A window or a state without its block in the first group serves no resume point, and a store is in
use while any store of its model is. Invariant: stores are only read. Cost: the manifests of all
stores.
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
    """Facts about a store from the stores of all groups of its model.

    Attributes:
        age: nanoseconds since the last use of a block in any of them. None without a block.
        keys: content keys of the first group's blocks. None for the first group's own store.
    """

    age: int | None
    keys: frozenset[bytes] | None


def parts(found: Iterable[Path], wall: int) -> dict[Path, Part]:
    """Return the stores of groups of layers, with ages as of `wall`, in nanoseconds.

    A model without a readable store of its first group is left out.
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
    """Return the common description of a model's stores, and the group of this store, if any."""
    try:
        fields: dict[str, Any] = dict(json.loads(about))
    except (TypeError, ValueError, RecursionError):
        return about, None
    group = fields.pop("group", None)
    fields.pop("layout", None)  # the layout of the store's own rows
    return json.dumps(fields, sort_keys=True), group if isinstance(group, int) else None
