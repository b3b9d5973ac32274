"""LayerGroup: layers of a model that keep the same part of a sequence in the same form.

Invariant: every existing group can be served as described. A field unsuited to its kind is refused.
Cost: arithmetic on a few integers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvtrie.errors import ConfigError
from kvtrie.model.layout import DTYPE_BYTES
from kvtrie.settings.argument import few, flag, put, whole, word

__all__ = ["MOST_LAYERS", "LayerGroup"]

MOST_LAYERS = 2**16 - 1
_KINDS = ("full", "sliding", "chunked", "state")
_WINDOWED = ("sliding", "chunked")
_SHAPE = ("kv_heads", "head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same kind of attention.

    A None in the KV's shape means the model's value.

    Attributes:
        layers: indices of model layers, ascending.
        kind: "full" attention, "sliding" window, "chunked" attention, or "state", a recurrent state
            in place of KV.
        window: tokens of a sliding window or a chunk, and 0 for full attention and states.
        sinks: leading tokens that stay visible to a sliding window.
        kv_heads: heads of K and V, of all ranks together.
        head_dim: numbers per head of K, or in a latent group the first width of the row.
        v_head_dim: numbers per head of V, or in a latent group the second width of the row.
        latent: whether a compressed row per token replaces both K and V.
        dtype: torch's name of the stored KV type.
        state_bytes: bytes of a state, of all layers of the group, on a rank.
        tokens_per_row: tokens per row of KV.

    Raises:
        ConfigError: the kind is unknown, or a field is unsuited to the kind.
    """

    layers: tuple[int, ...]
    kind: Literal["full", "sliding", "chunked", "state"] = "full"
    window: int = 0
    sinks: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    latent: bool | None = None
    dtype: str | None = None
    state_bytes: int | None = None
    tokens_per_row: int = 1

    def __post_init__(self) -> None:
        word("kind of a layer group", self.kind, _KINDS)
        layers = few("layers of a group", self.layers, MOST_LAYERS)
        put(
            self,
            layers=tuple(whole("layer of a group", at, 0, MOST_LAYERS - 1) for at in layers),
            window=whole("window of a layer group", self.window, 0, 2**63 - 1),
            sinks=whole("sinks of a layer group", self.sinks, 0, 2**63 - 1),
            tokens_per_row=whole("tokens_per_row", self.tokens_per_row, 1, 2**31 - 1),
        )
        for name in (*_SHAPE, "state_bytes"):
            if (count := getattr(self, name)) is not None:
                most = 2**62 if name == "state_bytes" else 2**31 - 1
                put(self, **{name: whole(f"{name} of a layer group", count, 1, most)})
        if self.latent is not None:
            put(self, latent=flag("latent of a layer group", self.latent))
        if self.dtype is not None:
            word("dtype of a layer group", self.dtype, DTYPE_BYTES)
        self._check()

    def _check(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"a layer group names ascending layers, not {self.layers}")
        if (self.window > 0) != (self.kind in _WINDOWED):
            raise ConfigError(
                f"a group of kind {self.kind!r} has window {self.window}: full attention and a "
                "state have window 0, the others a window above 0"
            )
        if self.sinks and self.kind != "sliding":
            raise ConfigError(
                f"a group of kind {self.kind!r} has {self.sinks} sinks: only a sliding window has"
            )
        if (self.state_bytes is not None) != (self.kind == "state"):
            raise ConfigError(
                f"a group of kind {self.kind!r} has state_bytes {self.state_bytes}: a state needs "
                "them, KV has none"
            )
        if self.kind == "state":
            shaped = [name for name in (*_SHAPE, "latent", "dtype") if self._given(name)]
            if shaped or self.tokens_per_row != 1:
                raise ConfigError(
                    f"a state has state_bytes alone, not {', '.join(shaped) or 'tokens_per_row'}"
                )
        if self.latent and self.kind == "chunked":
            raise ConfigError("a latent group is 'full' or 'sliding', not 'chunked'")

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def identity(self) -> str:
        """Return all settings that decide the group's stored bytes, as text without blanks."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self)[2:])
        named = [f"{name}={value}" for name, value, default in given if value != default]
        return ":".join([self.kind, _ranges(self.layers), *named])


def _ranges(layers: tuple[int, ...]) -> str:
    """Format layers as `0-3,7`."""
    starts = [at for at in layers if at - 1 not in set(layers)]
    ends = [at for at in layers if at + 1 not in set(layers)]
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in pairs)
