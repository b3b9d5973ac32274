"""Form: what decides where every number of a block's KV lies, and so what two tiers must share.

Bytes move between tiers as they are. Invariant: two tiers exchange bytes only if their forms are
equal, which is looked at before the first move. Cost: arithmetic, once per tier.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.shape import ModelShape

__all__ = ["Form", "Formed", "agree"]


@dataclass(frozen=True, slots=True)
class Form:
    """How one rank's KV of a block lies on a tier.

    Attributes:
        layers: layers of the model.
        block_tokens: tokens per block.
        heads: heads of K and of V on this rank.
        head_dim: numbers per head of K.
        v_head_dim: numbers per head of V.
        layout: how one layer of a block lies.
    """

    layers: int
    block_tokens: int
    heads: int
    head_dim: int
    v_head_dim: int
    layout: Layout

    @classmethod
    def of(cls, model: ModelShape, layout: Layout | None, block_tokens: int) -> Form:
        """The form of a model's KV; a layout of None is kvtrie's own.

        Dense, with K and V joined where their widths allow.
        """
        v_head_dim = model.v_head_dim or model.head_dim
        if layout is None:
            kv = "joined" if model.latent or v_head_dim == model.head_dim else "split"
            layout = Layout(dtype=model.dtype, kv=kv, latent=model.latent)
        return cls(model.layers, block_tokens, model.rank_heads, model.head_dim, v_head_dim, layout)

    def planes(self) -> tuple[int, ...]:
        """Bytes of one layer of one block in each of the layout's tensors."""
        return self.layout.planes(self.block_tokens, self.heads, self.head_dim, self.v_head_dim)

    def apart(self, other: Form) -> list[str]:
        """Where two forms differ, in words: the name, what is here and what is there."""
        mine, theirs = ({**asdict(one), **asdict(one.layout)} for one in (self, other))
        return [
            f"{name} {mine[name]} and {theirs[name]}"
            for name in mine
            if name != "layout" and mine[name] != theirs[name]
        ]


@runtime_checkable
class Formed(Protocol):
    """A pool or storage that tells its form; what does not tell takes any bytes."""

    @property
    def form(self) -> Form:
        """How its bytes lie."""
        ...


def agree(tiers: Iterable[tuple[str, Form]]) -> None:
    """Look that all tiers, given with a name each, may exchange bytes.

    Raises:
        ConfigError: two of them differ; both numbers are told.
    """
    named = list(tiers)
    for name, form in named[1:]:
        first, wanted = named[0]
        if differences := wanted.apart(form):
            raise ConfigError(f"{first} and {name} differ: {', '.join(differences)}")
