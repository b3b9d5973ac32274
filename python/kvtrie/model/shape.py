"""ModelShape: the properties of a model that decide the size and the meaning of its KV.

Invariant: equal identities mean exchangeable KV. An unsupported structure is refused, never
guessed.
Cost: arithmetic on a few integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.model.layer_group import MOST_LAYERS, LayerGroup
from kvtrie.model.layout import DTYPE_BYTES
from kvtrie.model.model_config import (
    groups_of,
    kv_heads_of,
    latent_of,
    number_of,
    refuse_unknown,
)
from kvtrie.settings.argument import few, flag, instance, put, text, whole, word

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ModelShape", "require_fingerprint"]

_OPTIONAL = ("v_head_dim", "query_heads", "hidden")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model's KV.

    Attributes:
        layers: model layers, 1 to 65 535.
        kv_heads: heads of K and V, of the whole model.
        head_dim: numbers per head of K, or with `latent` numbers of the vector per token.
        dtype: torch's name of the stored KV type.
        v_head_dim: numbers per head of V if different from K's, or with `latent` of a second part
            of the vector.
        latent: True if a compressed vector per token replaces both K and V.
        query_heads: heads of Q, if known.
        hidden: width of the residual stream, if known, for the cost of computation.
        groups: layers by kind of attention. Empty means full attention everywhere. A layer is in at
            most one group with KV and one group with a state. A layer in neither keeps nothing.
        fingerprint: name of the weights, RoPE settings and adapters, so that KV of two models never
            mixes. `kvtrie.engines.transformers.fingerprint(model)` computes it. Storages and peers
            outside the process refuse an empty fingerprint.
        tp: tensor-parallel ranks. The sizes below are the sizes of a rank.

    Raises:
        ConfigError: an invalid number, an unknown dtype, a layer in two groups with KV or in two
            groups with a state, or a layer the model does not have.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    v_head_dim: int | None = None
    latent: bool = False
    query_heads: int | None = None
    hidden: int | None = None
    groups: tuple[LayerGroup, ...] = ()
    fingerprint: str = ""
    tp: int = 1

    def __post_init__(self) -> None:
        put(
            self,
            layers=whole("layers", self.layers, 1, MOST_LAYERS),
            latent=flag("latent", self.latent),
            groups=tuple(
                instance("a layer group", group, LayerGroup)
                for group in few("groups", self.groups, MOST_LAYERS)
            ),
        )
        for name in ("kv_heads", "head_dim", "v_head_dim", "query_heads", "hidden", "tp"):
            count, optional = getattr(self, name), name in _OPTIONAL
            if not (optional and count is None):
                put(self, **{name: whole(name, count, 1, 2**31 - 1)})
        word("dtype", self.dtype, DTYPE_BYTES)
        text("fingerprint", self.fingerprint)
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ConfigError(f"{self.kv_heads} KV heads do not divide over {self.tp} ranks")
        self._check_groups()

    def _check_groups(self) -> None:
        known: dict[tuple[bool, int], int] = {}
        for number, group in enumerate(self.groups):
            if group.layers[-1] >= self.layers:
                raise ConfigError(
                    f"group {number} names layer {group.layers[-1]}, the model has layers 0 to "
                    f"{self.layers - 1}"
                )
            state = group.kind == "state"
            for layer in group.layers:
                if (first := known.setdefault((state, layer), number)) != number:
                    raise ConfigError(
                        f"layer {layer} is in groups {first} and {number}, which both keep "
                        f"{'a state' if state else 'KV'}: at most one wanted"
                    )
            heads = group.kv_heads or self.kv_heads
            if heads % self.tp and self.tp % heads:
                raise ConfigError(
                    f"{heads} KV heads of group {number} do not divide over {self.tp} ranks"
                )

    @classmethod
    def from_config(
        cls,
        config: Any,  # noqa: ANN401 - a PretrainedConfig, without importing transformers
        *,
        dtype: str | None = None,
        fingerprint: str = "",
        tp: int = 1,
    ) -> Self:
        """Return the shape described by a transformers configuration.

        Args:
            config: a `PretrainedConfig`. Of a multimodal configuration, the text part is read.
            dtype: torch's name of the KV's type, by default the configuration's, else float32.
            fingerprint: name of the weights, not part of a configuration.
            tp: tensor-parallel ranks.

        Raises:
            ConfigError: a structure with more than plain K and V of every layer (recurrent layers,
                latent attention, shared KV, encoder and decoder), or missing numbers.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        refuse_unknown(config)
        layers = number_of(config, "num_hidden_layers")
        query_heads = number_of(config, "num_attention_heads")
        hidden = number_of(config, "hidden_size")
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None:
            if hidden % query_heads:
                raise ConfigError(f"hidden_size {hidden} is no multiple of {query_heads} heads")
            head_dim = hidden // query_heads
        latent = latent_of(config)
        kv_heads, width = (1, latent[0]) if latent else (kv_heads_of(config, query_heads), head_dim)
        stated = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        return cls(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=width,
            v_head_dim=latent[1] if latent else None,
            dtype=dtype or str(stated or "float32").removeprefix("torch."),
            query_heads=query_heads,
            hidden=hidden,
            groups=groups_of(config, layers),
            fingerprint=fingerprint,
            tp=tp,
        )

    @property
    def rank_heads(self) -> int:
        """KV heads on a rank: `max(1, kv_heads / tp)`. A latent vector is on every rank."""
        return self.kv_heads if self.latent else max(1, self.kv_heads // self.tp)

    @property
    def even(self) -> bool:
        """Whether every layer keeps KV of the model's own shape: a row of equal width per token."""
        if self.latent and self.v_head_dim is not None:
            return False
        if not self.groups:
            return True
        plain = all(
            group.kind != "state"
            and group.tokens_per_row == 1
            and self._form(group) == self._form()
            for group in self.groups
        )
        return plain and sum(len(group.layers) for group in self.groups) == self.layers

    def layer_bytes(self, block_tokens: int, group: int | None = None) -> int:
        """Return the bytes of a layer of a block on a rank.

        The size is `block_tokens / tokens_per_row x rank_heads x (head_dim + v_head_dim) x bytes of
        dtype`. A latent vector counts as a head.

        Args:
            block_tokens: tokens of the block.
            group: the number of a group in `groups`, or None for all layers, which must be alike.

        Raises:
            ConfigError: the layers are not alike, the group does not exist or has a state, or
                `block_tokens` is no multiple of the group's `tokens_per_row`.
        """
        block_tokens = whole("block_tokens", block_tokens, 1, 2**63 - 1)
        if group is None:
            if not self.even:
                raise ConfigError(
                    f"the {self.layers} layers of this model do not keep the same KV "
                    f"({self._named_groups()}), which is not supported here"
                )
            return block_tokens * self._row()
        one = self._group(group)
        if one.kind == "state":
            raise ConfigError(f"group {group} keeps a state, which has no bytes per token")
        if block_tokens % one.tokens_per_row:
            raise ConfigError(
                f"block_tokens is {block_tokens}, a multiple of tokens_per_row "
                f"{one.tokens_per_row} of group {group} wanted"
            )
        return block_tokens // one.tokens_per_row * self._row(one)

    def block_bytes(self, block_tokens: int, group: int | None = None) -> int:
        """Return the bytes of a block on a rank: of all layers of a group, or of its state.

        Args:
            block_tokens: tokens of the block.
            group: the number of a group in `groups`, or None for all groups with KV.

        Raises:
            ConfigError: as for `layer_bytes`.
        """
        if group is not None:
            one = self._group(group)
            if one.state_bytes is not None:
                return one.state_bytes
            return len(one.layers) * self.layer_bytes(block_tokens, group)
        if self.even:
            return self.layers * self.layer_bytes(block_tokens)
        kept = (at for at, one in enumerate(self.groups) if one.kind != "state")
        return sum(self.block_bytes(block_tokens, at) for at in kept)

    def _group(self, number: int) -> LayerGroup:
        groups = self.groups or (LayerGroup(tuple(range(self.layers))),)
        return groups[whole("group", number, 0, len(groups) - 1)]

    def form(self, group: int | None = None) -> tuple[int, int, int, bool, str]:
        """Return the form of the KV of a token in a layer, on a rank.

        Args:
            group: the number of a group in `groups`, or None for the model's own values.

        Returns:
            Heads, numbers per head of K, of V (0 for a latent row of a single width), whether it is
            a latent row, and torch's name of the dtype.

        Raises:
            ConfigError: the group does not exist.
        """
        return self._form(None if group is None else self._group(group))

    def _form(self, group: LayerGroup | None = None) -> tuple[int, int, int, bool, str]:
        """Return heads on a rank, widths of K and V, latent and dtype of a layer's rows."""

        def value(name: str) -> Any:  # noqa: ANN401 - of the field's type
            own = None if group is None else getattr(group, name)
            return getattr(self, name) if own is None else own

        latent, heads, key = value("latent"), value("kv_heads"), value("head_dim")
        second = value("v_head_dim") or (0 if latent else key)
        on_rank = heads if latent else max(1, heads // self.tp)
        return on_rank, key, second, latent, value("dtype")

    def _row(self, group: LayerGroup | None = None) -> int:
        """Return the bytes of a row of a layer on a rank."""
        heads, key, second, _, dtype = self._form(group)
        return heads * (key + second) * DTYPE_BYTES[dtype]

    def _named_groups(self) -> str:
        return " ".join(group.identity() for group in self.groups)

    def identity(self) -> str:
        """Return all settings that decide whether KV bytes are exchangeable, as a line of text."""
        value = "-" if self.v_head_dim is None else self.v_head_dim
        kind = "latent" if self.latent else "kv"
        shape = f"{self.layers}x{self.kv_heads}x{self.head_dim}/{value}"
        line = f"{self.fingerprint} {kind} {shape} {self.dtype} tp{self.tp}"
        return f"{line} {self._named_groups()}" if self.grouped else line

    @property
    def grouped(self) -> bool:
        """Whether the groups differ from full attention in all layers."""
        return self.groups != () and self.groups != (LayerGroup(tuple(range(self.layers))),)


def require_fingerprint(model: ModelShape, what: str) -> None:
    """Raise if a storage shared with other processes lacks a name for the weights.

    Args:
        model: the shape of the model.
        what: name of the storage of the KV.

    Raises:
        ConfigError: the fingerprint is empty.
    """
    if not model.fingerprint:
        raise ConfigError(
            f"{what} may be read by another process, and other weights of the same shape "
            f"({model.identity().strip()}) would match: give the ModelShape a fingerprint, as "
            "kvtrie.engines.transformers.fingerprint(model) does"
        )
