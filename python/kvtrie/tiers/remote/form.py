"""Format of one rank's values in a store: their names, header and checksums.

Invariant: two layouts, two ranks, or two numbers of ranks give different names; latent KV, which is
equal on all ranks, gives one. Cost: one hash of the settings.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from kvtrie._kvtrie import ValueFormat
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["ValueNames", "value_format"]


class ValueNames(NamedTuple):
    """The fields that form names of one rank's values, all but the secret.

    Attributes:
        layers: layers of a value.
        layer_bytes: bytes of a layer.
        block_tokens: tokens of its block.
        meaning: the digest of a layout and of the rank's part of it.
    """

    layers: int
    layer_bytes: int
    block_tokens: int
    meaning: bytes

    @classmethod
    def of(cls, form: BlockFormat, rank: int, ranks: int) -> ValueNames:
        """Return those of a rank.

        Raises:
            ConfigError: a layout with K and V apart.
        """
        planes = form.planes()
        if len(planes) != 1:
            raise ConfigError("a store keeps K and V of a layer together: use Layout(kv='joined')")
        about = asdict(form) | {"layout": form.layout.digest().hex(), "rank": rank, "ranks": ranks}
        about = json.dumps(about, sort_keys=True).encode()
        meaning = hashlib.blake2b(about, digest_size=32).digest()
        return cls(form.layers, planes[0], form.block_tokens, meaning)

    def format(self, secret: bytes | None) -> ValueFormat:
        """Return names and checksums, keyed by a secret if there is one."""
        return ValueFormat(**self._asdict(), secret=secret)


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
    if model.latent:
        rank, ranks = 0, 1
    return ValueNames.of(form, rank, ranks).format(secret)
