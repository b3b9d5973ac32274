"""BlockFormat: the memory layout and number format of a block's KV on a tier.

Memory tiers may have different number formats. Storages take bytes unchanged.
Invariant: two tiers exchange KV only if their formats are equal, except the fields in `FORMAT`,
converted by copies between memories.
Cost: arithmetic, once per tier.
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
"""Fields allowed to differ between two memories: copies convert them."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of a rank's KV of a block on a tier.

    Attributes:
        layers: layers of the model.
        block_tokens: tokens per block.
        heads: heads of K and of V on this rank.
        head_dim: numbers per head of K.
        v_head_dim: numbers per head of V.
        layout: layout of a layer of a block.
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
            layout: the layout, or None for kvtrie's own: dense, with K and V joined if their widths
                allow.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: the layers do not all keep the same KV.
        """
        model.layer_bytes(block_tokens)  # raises if layers differ
        v_head_dim = model.v_head_dim or model.head_dim
        if layout is None:
            kv = "joined" if model.latent or v_head_dim == model.head_dim else "split"
            layout = Layout(dtype=model.dtype, kv=kv, latent=model.latent)
        return cls(model.layers, block_tokens, model.rank_heads, model.head_dim, v_head_dim, layout)

    @classmethod
    def of_group(
        cls, model: ModelShape, group: int | None, block_tokens: int, layout: Layout | None
    ) -> BlockFormat:
        """Return the format of a group of layers. A state is a row of bytes per layer.

        Args:
            model: the shape of the model, with the sizes of a rank.
            group: the number of the group, or None for all layers as a single group.
            block_tokens: tokens of a block.
            layout: the tier's layout, or None for the model's own.

        Raises:
            ConfigError: as `of`, or state bytes not divisible among the layers, or a layout
                unsupported by groups.
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
        """Return the bytes of a layer of a block in each of the layout's tensors."""
        return self.layout.planes(self.block_tokens, self.heads, self.head_dim, self.v_head_dim)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a layer of a block, or of a layer's share of a state."""
        return self.head_dim if self.layout.opaque == STATE else sum(self.planes())

    @classmethod
    def first(cls, model: ModelShape, layout: Layout, block_tokens: int) -> BlockFormat:
        """Return the required format of the first tier: a layout with the model's dtype.

        Args:
            model: the model.
            layout: the layout, ignoring its dtype and scales.
            block_tokens: tokens of a block.
        """
        return cls.of(model, replace(layout, dtype=model.dtype, scales="none"), block_tokens)

    def differences(self, other: BlockFormat, *, but: Collection[str] = ()) -> list[str]:
        """Return the differing fields of two formats, as text: name, value here, value there.

        Args:
            other: the format to compare with.
            but: names of fields allowed to differ.
        """
        mine, theirs = ({**asdict(one), **asdict(one.layout)} for one in (self, other))
        return [
            f"{name} {mine[name]} and {theirs[name]}"
            for name in mine
            if name not in {"layout", *but} and mine[name] != theirs[name]
        ]


@runtime_checkable
class HasBlockFormat(Protocol):
    """A pool or storage with a known format. A storage without a format takes any bytes."""

    @property
    def block_format(self) -> BlockFormat:
        """Format of the bytes."""
        ...
