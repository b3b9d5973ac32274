"""Format of a rank's values in a store: their names, header and checksums.

With separate groups of layers, a block has a value per group.
Invariant: different layouts, ranks, numbers of ranks or groups give different names. Latent KV is
equal on all ranks and has the same name.
Cost: a hash of the settings.
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
    """The fields that form the names of a rank's values, except the secret.

    Attributes:
        layers: layers of a value.
        layer_bytes: bytes of a layer.
        block_tokens: tokens of its block.
        meaning: the digest of a layout and of the rank's part.
    """

    layers: int
    layer_bytes: int
    block_tokens: int
    meaning: bytes

    @classmethod
    def of(
        cls,
        form: BlockFormat,
        rank: int,
        ranks: int,
        *,
        group: int | None = None,
        block_tokens: int | None = None,
    ) -> ValueNames:
        """Return the fields of a rank's values.

        Args:
            form: the format of the values.
            rank: the rank of the value's part of the KV.
            ranks: number of ranks.
            group: the layer group of a value, or None if all layers are a single group. K and V of
                a layer are consecutive in the slots of a group. The names of the first group
                contain no group.
            block_tokens: tokens of a block, by default from the format. The format has fewer rows
                if several tokens share a row.

        Raises:
            ConfigError: a layout with separate K and V, except for a group.
        """
        if group is None and len(form.planes()) != 1:
            raise ConfigError("a store keeps K and V of a layer together: use Layout(kv='joined')")
        about = asdict(form) | {"layout": form.layout.digest().hex(), "rank": rank, "ranks": ranks}
        if group:
            about["group"] = group
        about = json.dumps(about, sort_keys=True).encode()
        meaning = hashlib.blake2b(about, digest_size=32).digest()
        return cls(form.layers, form.unit_bytes, block_tokens or form.block_tokens, meaning)

    def format(self, secret: bytes | None) -> ValueFormat:
        """Return names and checksums, keyed by a secret if given."""
        return ValueFormat(**self._asdict(), secret=secret)


def value_format(
    model: ModelShape,
    form: BlockFormat,
    secret: bytes | None,
    *,
    rank: int = 0,
    ranks: int = 1,
    group: int | None = None,
    block_tokens: int | None = None,
) -> ValueFormat:
    """Return names and checksums of a rank's blocks, or of their part of a layer group.

    Latent KV is equal on all ranks, so its blocks have the names of rank 0 of 1. The remaining
    arguments are as for `ValueNames.of`.

    Raises:
        ConfigError: a layout with separate K and V, an invalid rank, or an empty secret.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    if model.latent:
        rank, ranks = 0, 1
    names = ValueNames.of(form, rank, ranks, group=group, block_tokens=block_tokens)
    return names.format(secret)
