"""The layout of a layer group on a tier: K of all rows of a layer, then V, or a raw state.

Invariant: only the model knows the bytes of a state, so they have no other format.
Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape

__all__ = ["STATE", "group_bytes", "group_layout"]

STATE = "state"
"""The name of the layout of states, opaque bytes outside the model."""


def group_layout(model: ModelShape, group: int, layout: Layout | None) -> Layout:
    """Return the layout of a layer of a block of a group.

    Args:
        model: the model.
        group: the number of the group.
        layout: the tier's layout, of which only dtype and scales count, or None for the model's
            own.

    Raises:
        ConfigError: a tier layout that changes more than dtype and scales.
    """
    if model.groups[group].kind == "state":
        return Layout(dtype="uint8", opaque=STATE)
    _, _, second, latent, dtype = model.form(group)
    # A latent row of two widths is stored as two rows.
    native = Layout(dtype=dtype, kv="split", latent=latent and not second)
    if layout is None:
        return native
    if layout != Layout(dtype=layout.dtype, scales=layout.scales):
        raise ConfigError(
            f"{layout} for groups of layers that are kept apart: another dtype and scales, and "
            "nothing else, are supported"
        )
    return replace(native, dtype=layout.dtype, scales=layout.scales)


def group_bytes(
    model: ModelShape, block_tokens: int, layout: Layout | None = None
) -> tuple[int, ...]:
    """Return the bytes of a block of each group, or of a state.

    Args:
        model: the model, with the sizes of a rank.
        block_tokens: tokens of a block.
        layout: the tier's layout, or None for the model's own.

    Raises:
        ConfigError: as for `group_layout`, or a group without fixed KV bytes per block.
    """
    sizes: list[int] = []
    for group, one in enumerate(model.groups):
        size = model.block_bytes(block_tokens, group)
        if layout is not None and one.kind != "state":
            heads, key, second, _, _ = model.form(group)
            planes = group_layout(model, group, layout).planes(
                block_tokens // one.tokens_per_row, heads, key, second or None
            )
            size = len(one.layers) * sum(planes)
        sizes.append(size)
    return tuple(sizes)
