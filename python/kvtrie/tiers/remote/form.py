"""Format of one rank's values in a store: their names, header and checksums.

Where groups of layers are kept apart, a block has a value per group.
Invariant: two layouts, two ranks, two numbers of ranks, or two groups give different names; latent
KV, which is equal on all ranks, gives one. Cost: one hash of the settings.
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
    def of(
        cls,
        form: BlockFormat,
        rank: int,
        ranks: int,
        *,
        group: int | None = None,
        block_tokens: int | None = None,
    ) -> ValueNames:
        """Return those of a rank.

        Args:
            form: the format of the values.
            rank: the rank whose part of the KV a value is.
            ranks: how many there are.
            group: the group of layers that a value is of; None if all layers are one group. K and V
                of a layer follow one another in the slots of a group. The names of the first group
                say no group.
            block_tokens: tokens of a block; None is those of the format, which has fewer rows where
                several tokens share one.

        Raises:
            ConfigError: a layout with K and V apart, unless it is that of a group.
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
        """Return names and checksums, keyed by a secret if there is one."""
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
    """Names and checksums of one rank's blocks, or of their part of a group of layers.

    Latent KV is equal on all ranks, so its blocks have the names of rank 0 of 1. The other
    arguments are those of `ValueNames.of`.

    Raises:
        ConfigError: a layout with K and V apart, a rank that is not there, an empty secret.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    if model.latent:
        rank, ranks = 0, 1
    names = ValueNames.of(form, rank, ranks, group=group, block_tokens=block_tokens)
    return names.format(secret)
