"""BlockFormat: the place of each number of a block's KV on a tier.

Memory may keep numbers in another format than the memory above it; storages take bytes as they are.
Invariant: two tiers exchange KV only if their formats are equal, but for the fields in `FORMAT`,
which copies between memories convert. Cost: arithmetic, once per tier.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.model.group_layout import STATE, group_layout
from kvtrie.model.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtrie.model.shape import ModelShape

__all__ = ["FORMAT", "BlockFormat", "HasBlockFormat"]

FORMAT = ("dtype", "scales")
"""Fields in which two memories may differ: copies between them convert."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of one rank's KV of a block on a tier.

    Attributes:
        layers: layers of the model.
        block_tokens: tokens per block.
        heads: heads of K and of V on this rank.
        head_dim: numbers per head of K.
        v_head_dim: numbers per head of V.
        layout: layout of one layer of a block.
    """

    layers: int
    block_tokens: int
    heads: int
    head_dim: int
    v_head_dim: int
    layout: Layout

    @classmethod
    def of(cls, model: ModelShape, layout: Layout | None, block_tokens: int) -> BlockFormat:
        """Return the format of a model's KV.

        Args:
            model: the model.
            layout: the layout; None is kvtrie's own: dense, with K and V joined where their widths
                allow.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: layers that do not all keep the same KV.
        """
        model.layer_bytes(block_tokens)  # refuses layers that are not alike
        v_head_dim = model.v_head_dim or model.head_dim
        if layout is None:
            kv = "joined" if model.latent or v_head_dim == model.head_dim else "split"
            layout = Layout(dtype=model.dtype, kv=kv, latent=model.latent)
        return cls(model.layers, block_tokens, model.rank_heads, model.head_dim, v_head_dim, layout)

    @classmethod
    def of_group(
        cls, model: ModelShape, group: int | None, block_tokens: int, layout: Layout | None
    ) -> BlockFormat:
        """Return the format of a group of layers; a state is a row of bytes per layer.

        Args:
            model: the shape whose KV is kept; sizes are those of one rank.
            group: which of its groups; None for all layers, which are one group.
            block_tokens: tokens of a block.
            layout: that of the tier; None is the model's own.

        Raises:
            ConfigError: as `of`; states whose bytes do not divide among their layers, or a layout
                that groups cannot have.
        """
        if group is None:
            return cls.of(model, layout, block_tokens)
        one, layout = model.groups[group], group_layout(model, group, layout)
        layers = len(one.layers)
        if one.state_bytes is None:
            heads, key, value, _, _ = model.form(group)
            rows = block_tokens // one.tokens_per_row
            return cls(layers, rows, heads, key, value or key, layout)
        if one.state_bytes % layers:
            raise ConfigError(
                f"group {group} has states of {one.state_bytes} bytes for {layers} layers: a "
                "multiple wanted"
            )
        return cls(layers, block_tokens, 1, one.state_bytes // layers, 1, layout)

    def planes(self) -> tuple[int, ...]:
        """Return the bytes of one layer of one block in each of the layout's tensors."""
        return self.layout.planes(self.block_tokens, self.heads, self.head_dim, self.v_head_dim)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one layer of a block, or of one layer's share of a state."""
        return self.head_dim if self.layout.opaque == STATE else sum(self.planes())

    @classmethod
    def first(cls, model: ModelShape, layout: Layout, block_tokens: int) -> BlockFormat:
        """Return the format that the first tier must have: a layout with the model's dtype.

        Args:
            model: the model.
            layout: the layout; its dtype and scales do not count.
            block_tokens: tokens of a block.
        """
        return cls.of(model, replace(layout, dtype=model.dtype, scales="none"), block_tokens)

    def differences(self, other: BlockFormat, *, but: Collection[str] = ()) -> list[str]:
        """Return the fields in which two formats differ, as text: name, value here, value there.

        Args:
            other: the format to compare with.
            but: names of fields that may differ.
        """
        mine, theirs = ({**asdict(one), **asdict(one.layout)} for one in (self, other))
        return [
            f"{name} {mine[name]} and {theirs[name]}"
            for name in mine
            if name not in {"layout", *but} and mine[name] != theirs[name]
        ]


@runtime_checkable
class HasBlockFormat(Protocol):
    """A pool or storage with a known format; one without takes any bytes."""

    @property
    def block_format(self) -> BlockFormat:
        """Format of its bytes."""
        ...
