"""ModelShape: the properties of a model that decide the size and the meaning of its KV.

Invariant: equal identities mean exchangeable KV; a structure that kvtrie cannot serve rightly is
refused, never guessed. Cost: arithmetic on a handful of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvtrie.argument import few, flag, instance, put, text, whole, word
from kvtrie.errors import ConfigError
from kvtrie.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LayerGroup", "ModelShape", "require_fingerprint"]

_MOST_LAYERS = 2**16 - 1
_KINDS = ("full", "sliding", "chunked", "state")
_OPTIONAL = ("v_head_dim", "query_heads", "hidden")
_KIND_OF = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
# Attributes of configurations whose state is not plain K and V of every layer.
_UNKNOWN = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "is_encoder_decoder",
    "layers_block_type",
    "block_types",
    "attn_layer_period",
    "ssm_cfg",
    "mamba_d_state",
    "linear_num_key_heads",
)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that attend in the same way.

    Attributes:
        layers: indices of model layers, ascending.
        kind: "full" attention, "sliding" window, "chunked" attention, or "state" (a recurrent
            state instead of KV, which is not supported).
        window: tokens that a sliding window or a chunk spans; 0 for full attention.
        sinks: leading tokens that stay visible to a sliding window.

    Raises:
        ConfigError: an unknown or unsupported kind, or a window that does not fit the kind.
    """

    layers: tuple[int, ...]
    kind: Literal["full", "sliding", "chunked", "state"] = "full"
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        word("kind of a layer group", self.kind, _KINDS)
        layers = few("layers of a group", self.layers, _MOST_LAYERS)
        put(
            self,
            layers=tuple(whole("layer of a group", at, 0, _MOST_LAYERS - 1) for at in layers),
            window=whole("window of a layer group", self.window, 0, 2**63 - 1),
            sinks=whole("sinks of a layer group", self.sinks, 0, 2**63 - 1),
        )
        if self.kind == "state":
            raise ConfigError(
                f"layers {self.layers} keep a recurrent state: groups of kind 'state' are not "
                "supported"
            )
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"a layer group names ascending layers, not {self.layers}")
        if (self.window > 0) != (self.kind != "full"):
            raise ConfigError(
                f"a group of kind {self.kind!r} has window {self.window}: full attention has "
                "window 0, the others a window above 0"
            )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model's KV.

    Attributes:
        layers: model layers, 1 to 65 535.
        kv_heads: heads of K and V, of the whole model.
        head_dim: numbers per head of K; with `latent`, numbers of the one vector per token.
        dtype: torch's name of the type that KV is kept in.
        v_head_dim: numbers per head of V where they differ from K's.
        latent: True where one compressed vector per token replaces both K and V.
        query_heads: heads of Q, where known.
        hidden: width of the residual stream, where known; it prices computation.
        groups: layers by kind of attention; empty means full attention everywhere. All layers keep
            all tokens; what a window hides is for the engine to mask.
        fingerprint: names the weights, RoPE settings and adapters, so that KV of two models never
            mixes: `kvtrie.engines.transformers.fingerprint(model)` gives one. Storages and peers
                outside the process refuse an empty one.
        tp: tensor-parallel ranks; sizes below are those of one rank.

    Raises:
        ConfigError: a number that cannot be, an unknown dtype, groups that do not name every layer
            once.
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
            layers=whole("layers", self.layers, 1, _MOST_LAYERS),
            latent=flag("latent", self.latent),
            groups=tuple(
                instance("a layer group", group, LayerGroup)
                for group in few("groups", self.groups, _MOST_LAYERS)
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
        if self.latent and self.v_head_dim is not None:
            raise ConfigError(f"a latent vector has no separate V: v_head_dim {self.v_head_dim}")
        named = sorted(layer for group in self.groups for layer in group.layers)
        if self.groups and named != list(range(self.layers)):
            raise ConfigError(
                f"groups name layers {named}, each of 0 to {self.layers - 1} wanted once"
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
        """The shape that a transformers configuration describes.

        Args:
            config: a `PretrainedConfig`; of a multimodal one, the text part is read.
            dtype: torch's name of the KV's type; None takes the configuration's, else float32.
            fingerprint: names the weights; a configuration does not know them.
            tp: tensor-parallel ranks.

        Raises:
            ConfigError: a structure whose KV is not plain K and V of every layer (recurrent
                layers, latent attention, shared KV, encoder and decoder), or missing numbers.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        strange = [name for name in _UNKNOWN if getattr(config, name, None)]
        if strange:
            settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in strange)
            raise ConfigError(
                f"a configuration with {settings} is not supported: write the ModelShape by hand"
            )
        if getattr(config, "is_heterogeneous", False):
            raise ConfigError("layers of different sizes are not supported")
        layers = _number(config, "num_hidden_layers")
        query_heads = _number(config, "num_attention_heads")
        hidden = _number(config, "hidden_size")
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None:
            if hidden % query_heads:
                raise ConfigError(f"hidden_size {hidden} is no multiple of {query_heads} heads")
            head_dim = hidden // query_heads
        stated = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        return cls(
            layers=layers,
            kv_heads=_kv_heads(config, query_heads),
            head_dim=head_dim,
            dtype=dtype or str(stated or "float32").removeprefix("torch."),
            query_heads=query_heads,
            hidden=hidden,
            groups=_groups(config, layers),
            fingerprint=fingerprint,
            tp=tp,
        )

    @property
    def rank_heads(self) -> int:
        """KV heads on one rank: `max(1, kv_heads / tp)`; a latent vector is on every rank."""
        return self.kv_heads if self.latent else max(1, self.kv_heads // self.tp)

    def layer_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer of one block on one rank.

        `block_tokens x rank_heads x (head_dim + v_head_dim) x bytes of dtype`; a latent vector
        counts once.
        """
        block_tokens = whole("block_tokens", block_tokens, 1, 2**63 - 1)
        width = self.head_dim
        if not self.latent:
            width += self.head_dim if self.v_head_dim is None else self.v_head_dim
        return block_tokens * self.rank_heads * width * DTYPE_BYTES[self.dtype]

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of all layers of one block on one rank."""
        return self.layers * self.layer_bytes(block_tokens)

    def identity(self) -> str:
        """All that decides whether two models' KV bytes are exchangeable, as one line of text."""
        value = "-" if self.v_head_dim is None else self.v_head_dim
        kind = "latent" if self.latent else "kv"
        shape = f"{self.layers}x{self.kv_heads}x{self.head_dim}/{value}"
        return f"{self.fingerprint} {kind} {shape} {self.dtype} tp{self.tp}"


def require_fingerprint(model: ModelShape, what: str) -> None:
    """Refuse what other processes may find while nothing names the weights.

    Args:
        model: whose KV is kept.
        what: name of the storage that keeps the KV.

    Raises:
        ConfigError: the fingerprint is empty.
    """
    if not model.fingerprint:
        raise ConfigError(
            f"{what} may be read by another process, and other weights of the same shape "
            f"({model.identity().strip()}) would match: give the ModelShape a fingerprint, as "
            "kvtrie.engines.transformers.fingerprint(model) does"
        )


def _number(config: Any, name: str) -> int:  # noqa: ANN401
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError(f"the configuration has no {name}: it says {value!r}")
    return value


def _kv_heads(config: Any, query_heads: int) -> int:  # noqa: ANN401
    """Heads of K and V as they are cached."""
    stated = getattr(config, "num_key_value_heads", None)
    # Falcon's own names; its new decoder repeats K and V for each query before they are cached.
    if stated is None and getattr(config, "multi_query", False):
        return query_heads if getattr(config, "new_decoder_architecture", False) else 1
    return stated or query_heads


def _groups(config: Any, layers: int) -> tuple[LayerGroup, ...]:  # noqa: ANN401
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = bool(window) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if sliding else "full_attention"] * layers
    if len(types) != layers:
        raise ConfigError(f"layer_types names {len(types)} layers of {layers}")
    unknown = sorted(set(types) - set(_KIND_OF))
    if unknown:
        raise ConfigError(f"layers of type {', '.join(unknown)} are not supported")
    if set(types) == {"full_attention"}:
        return ()
    windows = {
        "full_attention": 0,
        "sliding_attention": window or 0,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
    }
    return tuple(
        LayerGroup(
            layers=tuple(at for at, kind in enumerate(types) if kind == name),
            kind=_KIND_OF[name],  # pyright: ignore[reportArgumentType]
            window=windows[name],
        )
        for name in _KIND_OF
        if name in types
    )
