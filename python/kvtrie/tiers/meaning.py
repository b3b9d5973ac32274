"""The meaning of a tier's stored bytes, as JSON: model, layout, block size, rank and group.

Invariant: equal texts are equal meanings. A store with a different meaning is not found.
Cost: arithmetic.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape

__all__ = ["meaning", "of_all_parts"]


def meaning(
    model: ModelShape, layout: Layout, block_tokens: int, rank: int, group: int | None = None
) -> str:
    """Return a text of all settings that decide the meaning of the bytes."""
    fields: dict[str, Any] = asdict(model)
    names = ("layers", "kv_heads", "head_dim", "dtype", "v_head_dim", "latent", "fingerprint")
    about = {name: fields[name] for name in (*names, "tp")}
    if model.grouped:  # older stores have names without groups
        about["groups"] = [group.identity() for group in model.groups]
    about |= {"block_tokens": block_tokens, "rank": rank, "layout": layout.digest().hex()}
    if group is not None:
        about["group"] = group
    return json.dumps(about, sort_keys=True)


def of_all_parts(about: str) -> dict[str, Any] | str:
    """Return the meaning of a store without rank and group, or the text itself if not JSON."""
    try:
        fields = json.loads(about)
    except ValueError:
        return about
    parts = {"rank"} if "group" not in fields else {"rank", "group", "layout"}
    return {name: value for name, value in fields.items() if name not in parts}
