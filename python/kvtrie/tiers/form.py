"""Form: what decides where every number of a block's KV lies, and so what two tiers must share.

Memory may keep numbers in another format than the memory above it; storages take bytes as they are.
Invariant: two tiers exchange KV only if their forms are equal, but for what is converted, which is
looked at before the first move. Cost: arithmetic, once per tier.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.layout import Layout
from kvtrie.tiers import conversion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kvtrie.shape import ModelShape

__all__ = ["FORMAT", "Form", "Formed", "agree"]

FORMAT = ("dtype", "scales")
"""What two memories may differ in: copies between them convert."""


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

    @classmethod
    def first(cls, model: ModelShape, layout: Layout, block_tokens: int) -> Form:
        """The form that the first tier must have: a layout in the format that the model uses."""
        return cls.of(model, replace(layout, dtype=model.dtype, scales="none"), block_tokens)

    def apart(self, other: Form, *, but: Collection[str] = ()) -> list[str]:
        """Where two forms differ, in words: the name, what is here and what is there."""
        mine, theirs = ({**asdict(one), **asdict(one.layout)} for one in (self, other))
        return [
            f"{name} {mine[name]} and {theirs[name]}"
            for name in mine
            if name not in {"layout", *but} and mine[name] != theirs[name]
        ]


@runtime_checkable
class Formed(Protocol):
    """A pool or storage that tells its form; what does not tell takes any bytes."""

    @property
    def form(self) -> Form:
        """How its bytes lie."""
        ...


def agree(tiers: Iterable[tuple[str, Form, bool]]) -> None:
    """Look that tiers, from the first one down, may exchange KV.

    Args:
        tiers: a name, the form, and whether it is memory, which converts; anything else takes the
            bytes of the memory above it.

    Raises:
        ConfigError: two of them differ, both numbers are told; or KV cannot be converted.
    """
    named = list(tiers)
    for (above, wanted), (name, form, memory) in zip(_above(named), named, strict=True):
        if differences := wanted.apart(form, but=FORMAT if memory else ()):
            raise ConfigError(f"{above} and {name} differ: {', '.join(differences)}")
        if form.layout != wanted.layout:
            try:
                conversion.check(wanted, form)
            except ConfigError as error:
                raise ConfigError(f"{above} and {name} cannot exchange KV: {error}") from error


def _above(named: Iterable[tuple[str, Form, bool]]) -> Iterator[tuple[str, Form]]:
    """For each tier the memory that it exchanges KV with; the first one itself for the first."""
    above: tuple[str, Form] | None = None
    for name, form, memory in named:
        yield above or (name, form)
        if memory or above is None:
            above = name, form
