"""Decoder: a transformers decoder with rotary positions, driven one layer at a time.

`kvtrie.fuse` computes with it. Each layer runs the model's own modules with given masks, positions
and K, V. No architecture is reimplemented, and `kvtrie.fuse.gate` detects differences from the
model's own passes.
Invariant: a pass reads and writes K and V only through `merge`. Cost: that of the layers run.
Tables and masks are computed once per set of positions.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import inspect
import weakref
from threading import RLock, local
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache

from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.transformers.fused_cache import FusedCache
from kvtrie.engines.transformers.guard import Guard
from kvtrie.engines.transformers.hook import weakly
from kvtrie.engines.transformers.mask import masks
from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.engines.transformers.summed_weights import sum_weights
from kvtrie.errors import ConfigError
from kvtrie.fuse.rotation import Rotation
from kvtrie.fuse.turns import in_turn
from kvtrie.kernels import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from kvtrie.fuse.backing import FusedMemory
    from kvtrie.fuse.layers import Merge

__all__ = ["Decoder"]

_PARTS = ("layers", "rotary_emb")
_NORMS = ("norm", "final_layernorm", "final_layer_norm")
_APART = 3
"""Distance of two keys, in positions, compared to detect the rotation of a layer."""


class _Seen(Exception):  # noqa: N818 - not an error: the pass has done its work
    """Ends a pass after the requested states are captured."""


class _Taps(local):
    """Requests to the hooks of a decoder for this thread's pass.

    Attributes:
        first: receives the input of the first layer. The pass then ends.
        last: states `(n, hidden)` to replace the input of the last norm.
    """

    first: list[torch.Tensor] | None = None
    last: torch.Tensor | None = None


class _Merging(Cache):
    """Cache of a running layer: passes its K and V to `merge`, and returns the merged K and V."""

    def __init__(self, merge: Merge) -> None:
        super().__init__(layers=[])
        self._merge = merge

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,  # noqa: ARG002 - a single layer runs
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._merge(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


class Decoder:
    """`kvtrie.fuse.DecoderLayers` of a transformers model.

    Args:
        model: a causal language model in evaluation mode, with rotary positions and attention with
            arbitrary masks ("sdpa" or "eager").

    Attributes:
        model: the model.
        layers: number of layers.
        widths: number of KV heads, head size of K, head size of V.
        lock: held by each method, so threads can share a decoder. Passes of the model outside the
            decoder neither take the lock nor change their results.

    Raises:
        ConfigError: a model without rotary positions or in training mode, or with layers that
            cache anything except K and V.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = RLock()
        self.model = model
        self._name = ""
        self._taps = _Taps()
        self._hooks: list[RemovableHandle] = []
        end_of_life = weakref.finalize(self, _remove, self._hooks)
        end_of_life.atexit = False
        self.identity()

    def _learn(self) -> None:
        """Inspect the model: its parts, its settings, and the K and V of its first layer.

        Raises:
            ConfigError: the decoder does not support the model.
        """
        model = self.model
        base: Any = cast("Any", model).get_decoder()
        norms = [name for name in _NORMS if hasattr(base, name)]
        missing = [name for name in _PARTS if not hasattr(base, name)]
        if missing or not norms:
            raise ConfigError(
                f"{type(base).__name__} has no {', '.join(missing or _NORMS[:1])}: fusion turns "
                "keys by rotary positions, so it takes decoders that have these parts"
            )
        self._base = base
        takes = inspect.signature(base.layers[0].forward).parameters
        self._past = "layer_past" if "layer_past" in takes else "past_key_values"
        self._config: Any = cast("Any", model.config).get_text_config(decoder=True)
        self._limits = RopeLimits.of(self._config)
        self.layers: int = len(base.layers)
        rotates = inspect.signature(base.rotary_emb.forward).parameters
        kinds: Sequence[str | None] = getattr(self._config, "layer_types", None) or ()
        self._kinds: Sequence[str | None] = kinds or [None] * self.layers
        self._by_kind = "layer_type" in rotates
        self._tables: dict[tuple[int, str | None], tuple[torch.Tensor, torch.Tensor]] = {}
        self._ropes: tuple[int, Sequence[Rope | None]] = (0, ())
        self._pairs: Sequence[bool | None] = ()
        self._masks: tuple[torch.Tensor, int, Any] | None = None
        _remove(self._hooks)
        # Permanent: registering a hook per pass would disturb passes of concurrent threads.
        self._hooks += [
            base.layers[0].register_forward_pre_hook(weakly(self._at_first), with_kwargs=True),
            getattr(base, norms[0]).register_forward_pre_hook(weakly(self._at_norm)),
        ]
        with torch.no_grad():
            probe = torch.zeros(1, dtype=torch.int64, device=self.device)
            keys, values = self.project(0, self.embed(probe), probe, 1)
        self.widths: tuple[int, int, int] = (keys.shape[1], keys.shape[2], values.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of hidden states, K and V."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def vocabulary(self) -> int:
        """Number of token embeddings of the model."""
        return len(cast("Any", self.model).get_input_embeddings().weight)

    @in_turn
    def identity(self) -> str:
        """Return the model's `fingerprint`. Inspect the model again if it has changed.

        Raises:
            ConfigError: training mode, autocast, a foreign hook on the model, or a model not
                supported by the decoder.
        """
        guard = Guard(self.model)
        guard.ready()
        name = fingerprint(self.model)
        if name != self._name:
            self._name = ""
            self._learn()
            self._name = name
        return name

    @in_turn
    @torch.no_grad()
    def ropes(self, length: int) -> Sequence[Rope | None]:
        """Return the rotation tables of each layer, fp32 `(length, width / 2)`.

        The tables come from the model's own rotary module for a pass of `length` tokens, divided by
        the scale of some kinds of RoPE (YaRN). Rotated layers and rotation pairs are detected by
        comparing keys at two positions. A layer without rotation has None.
        """
        self._pairs = self._pairs or self._paired()
        if self._ropes[0] != length:
            made: dict[tuple[str | None, bool], Rope] = {}
            found: list[Rope | None] = []
            for index, neighbours in enumerate(self._pairs):
                if neighbours is None:
                    found.append(None)
                    continue
                key = self._kind(index), neighbours
                if key not in made:
                    made[key] = self._rope(length, *key)
                found.append(made[key])
            self._ropes = length, found
        return self._ropes[1]

    @in_turn
    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input `(n, hidden)` of the first layer for tokens `(n,)`."""
        ids = ids.to(self.device)[None]
        seen = self._taps.first = []
        positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        mask = masks(self.model, positions, 1)  # any: no layer runs
        try:
            self._base(
                input_ids=ids,
                position_ids=positions[None].expand_as(ids),
                attention_mask=mask,
                use_cache=False,
            )
        except _Seen:
            pass
        finally:
            self._taps.first = None
        return seen[0][0]

    @in_turn
    @torch.no_grad()
    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        merge: Merge,
        *,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer for some tokens, see `DecoderLayers.layer`."""
        given: dict[str, Any] = {
            "attention_mask": self._mask(index, positions, length),
            "position_ids": positions[None],
            "position_embeddings": self._cos_sin(index, positions, length),
            self._past: _Merging(merge),
            "use_cache": True,
        }
        run = self._base.layers[index]
        if weights is not None:
            run = sum_weights(run, self._config, weights)
        out = run(hidden[None], **given)
        return (out[0] if isinstance(out, tuple) else out)[0]

    @in_turn
    def project(
        self, index: int, hidden: torch.Tensor, positions: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated K `(n, kv_heads, head_dim)` and V of a layer, without its attention."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def note(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append((keys, values))
            raise _Seen

        try:
            self.layer(index, hidden, positions, length, note)
        except _Seen:
            return seen[0]
        raise ConfigError(
            f"layer {index} of {type(self._base).__name__} hands no K and V to a cache: there is "
            "nothing to fuse"
        )

    @in_turn
    @torch.no_grad()
    def values(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return V `(n, kv_heads, v_head_dim)` of a layer, by its norm and `v_proj` alone.

        A layer without these two modules, or with `v_norm`, runs up to its attention instead.
        """
        layer = self._base.layers[index]
        norm = getattr(layer, "input_layernorm", None)
        projection = getattr(getattr(layer, "self_attn", None), "v_proj", None)
        if norm is None or projection is None or hasattr(layer.self_attn, "v_norm"):
            positions = torch.arange(len(hidden), device=hidden.device)
            return self.project(index, hidden, positions, len(hidden))[1]
        return projection(norm(hidden)).view(len(hidden), self.widths[0], self.widths[2])

    @in_turn
    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits `(vocabulary,)` after the last token, by the model's full pass."""
        given: Any = {"input_ids": ids.to(self.device)[None], "use_cache": False}
        return cast("Any", self.model)(**given, logits_to_keep=1).logits[0, -1]

    @in_turn
    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `(n, vocabulary)` of states after the last layer.

        The model runs over `n` dummy tokens, and `hidden` replaces the input of its last norm, so
        all steps from there on are the model's. Costs a full pass.
        """
        places = torch.arange(len(hidden), device=self.device)[None]

        self._taps.last = hidden
        try:
            given: Any = {"input_ids": torch.zeros_like(places), "position_ids": places}
            return cast("Any", self.model)(**given, use_cache=False).logits[0]
        finally:
            self._taps.last = None

    def cache(self, kv: FusedMemory, length: int) -> FusedCache:
        """Return a transformers `Cache` of the first `length` tokens, for `past_key_values`."""
        return FusedCache(kv, length, self._limits.reach_of(length), self.model)

    def _at_first(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Capture the input of the first layer and end the pass, if requested by `_taps`."""
        # torch passes no keywords while a concurrent thread registers this hook.
        if self._taps.first is not None:
            self._taps.first.append(args[0] if args else (kwargs or {})["hidden_states"])
            raise _Seen

    def _at_norm(self, *_: object) -> tuple[torch.Tensor] | None:
        """Replace the input of the last norm, if requested by `_taps`."""
        return None if self._taps.last is None else (self._taps.last[None],)

    def _mask(self, index: int, positions: torch.Tensor, length: int) -> torch.Tensor | None:
        if self._masks is None or self._masks[0] is not positions or self._masks[1] != length:
            self._masks = positions, length, masks(self.model, positions, length)
        made = self._masks[2]
        return made[self._kinds[index]] if isinstance(made, dict) else made

    def _kind(self, index: int) -> str | None:
        """Return the kind of a layer, if the rotary module depends on it."""
        return self._kinds[index] if self._by_kind else None

    def _cos_sin(
        self, index: int, positions: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's cosines and sines at `positions`, for a pass of `length` tokens."""
        key = length, self._kind(index)
        if key not in self._tables:
            if any(size != length for size, _ in self._tables):
                self._tables = {}
            self._tables[key] = self._rotary(*key, self.dtype)
        cos, sin = self._tables[key]
        return cos[:, positions], sin[:, positions]

    def _rotary(
        self, length: int, kind: str | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(1, dtype=dtype, device=self.device)
        found = self._base.rotary_emb(like, positions, *((kind,) if self._by_kind else ()))
        if not isinstance(found, tuple) or len(found) != 2:  # noqa: PLR2004 - cosines and sines
            raise ConfigError(
                f"the rotary module of {type(self._base).__name__} gives no pair of cosines and "
                "sines"
            )
        return cast("tuple[torch.Tensor, torch.Tensor]", found)

    def _rope(self, length: int, kind: str | None, neighbours: bool) -> Rope:  # noqa: FBT001
        cos, sin = (each[0] for each in self._rotary(length, kind, torch.float32))
        middle = cos.shape[-1] // 2
        if torch.equal(cos[:, :middle], cos[:, middle:]):  # each angle comes twice
            cos, sin = cos[:, :middle], sin[:, :middle]
        elif torch.equal(cos[:, ::2], cos[:, 1::2]):
            cos, sin = cos[:, ::2], sin[:, ::2]
        scale = torch.hypot(cos, sin)
        return Rope((cos / scale).contiguous(), (sin / scale).contiguous(), neighbours=neighbours)

    def _paired(self) -> list[bool | None]:
        """Return, per layer, whether adjacent numbers rotate in pairs, or None without rotation."""
        like = self.embed(torch.zeros(1, dtype=torch.int64, device=self.device))
        # Any state except a padding token's, because it may be zero.
        hidden = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
        at = [torch.tensor([place], device=self.device) for place in (0, _APART)]
        found: list[bool | None] = []
        for index in range(self.layers):
            first, second = (
                self.project(index, hidden, place, _APART + 1)[0].float() for place in at
            )
            errors: dict[bool | None, float] = {None: float((first - second).norm())}
            for neighbours in (False, True):
                rope = self._rope(_APART + 1, self._kind(index), neighbours)
                turned = torch.empty_like(first)
                Rotation.between(rope, *at).into(first, turned)
                errors[neighbours] = float((turned - second).norm())
            found.append(min(errors, key=errors.__getitem__))
        return found


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()
