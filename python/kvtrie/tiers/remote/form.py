"""Format of one rank's values in a store: their names, header and checksums.

Invariant: two layouts, two ranks, or two numbers of ranks give different names; latent KV, which is
equal on all ranks, gives one. Cost: one hash of the settings.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtrie._kvtrie import ValueFormat
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["meaning_of", "value_format"]


def value_format(
    model: ModelShape, form: BlockFormat, secret: bytes | None, *, rank: int = 0, ranks: int = 1
) -> ValueFormat:
    """Names and checksums of one rank's blocks.

    Latent KV is equal on all ranks, so its blocks have the names of rank 0 of 1.

    Raises:
        ConfigError: a layout with K and V apart, a rank that is not there, an empty secret.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    planes = form.planes()
    if len(planes) != 1:
        raise ConfigError("a store keeps K and V of a layer together: use Layout(kv='joined')")
    if model.latent:
        rank, ranks = 0, 1
    return ValueFormat(
        layers=form.layers,
        layer_bytes=planes[0],
        block_tokens=form.block_tokens,
        meaning=meaning_of(form, rank, ranks),
        secret=secret,
    )


def meaning_of(form: BlockFormat, rank: int, ranks: int) -> bytes:
    """Return the digest of a layout and a rank's part of it, which the names contain."""
    about = asdict(form) | {"layout": form.layout.digest().hex(), "rank": rank, "ranks": ranks}
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=32).digest()
