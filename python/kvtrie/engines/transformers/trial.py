"""Trial: two passes over two tokens, to check how a model fills its cache.

Configurations are incomplete: a model may repeat heads before caching them, share layers, keep
states, bypass its own base module or read a prompt in both directions. A model is tried once, when
its first cache is opened.
Invariant: K and V of an accepted model have the first tier's format, layer by layer, and depend
only on tokens up to their own.
Cost: two forward passes over two tokens per model object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from transformers import Cache

from kvtrie.engines.identity.model_state import ModelCache, ModelState
from kvtrie.engines.transformers.guard import named, states
from kvtrie.errors import ConfigError
from kvtrie.model.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from kvtrie.tiers import Pool

__all__ = ["check_stated", "run_pass", "trial"]

_TOKENS = 2
# Largest difference by rounding, as a share of the largest number. Coarser formats allow more.
_APART = 1e-4
# Entry module of each tried model.
_entries: ModelCache[ref[torch.nn.Module]] = ModelCache()
# Errors of a model with an unsuitable cache. Running out of memory is not included.
_UNFIT = (AttributeError, IndexError, KeyError, TypeError, ValueError, NotImplementedError)


class _Recorder(Cache):
    """A cache for a single pass, recording the layers that use it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(layers=[])
        self.pool = pool
        self.given: list[int] = []
        self.first: list[torch.Tensor] = []  # per call, K and V of the first token

    def __len__(self) -> int:
        return self.pool.layers

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states(key_states, value_states, self.pool)
        if key_states.shape[2] != _TOKENS:
            raise ConfigError(
                f"the model caches K and V of {key_states.shape[2]} tokens where {_TOKENS} were "
                "given: prompt tuning and the like add positions that no token names"
            )
        self.given.append(layer_idx)
        self.first += [key_states[0, :, 0].float(), value_states[0, :, 0].float()]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - empty before the pass
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0


def check_stated(model: PreTrainedModel, shape: ModelShape, pool: Pool) -> None:
    """Refuse a model if its configuration does not match the tiers. Runs no pass.

    Args:
        model: the model.
        shape: the shape of the manager's model.
        pool: the memory of the first tier.

    Raises:
        ConfigError: the configuration does not match.
    """
    real = ModelShape.from_config(model.config, dtype=str(model.dtype).removeprefix("torch."))
    mine, theirs = (
        (one.layers, one.kv_heads, one.head_dim, one.v_head_dim or one.head_dim, one.dtype, device)
        for one, device in ((real, model.device.type), (shape, pool.device.type))
    )
    if mine != theirs:
        raise ConfigError(
            f"(layers, KV heads, head_dim, v_head_dim, dtype, device) of the model are {mine}, of "
            f"the manager and its first tier {theirs}"
        )


def trial(model: PreTrainedModel, pool: Pool, state: ModelState | None = None) -> torch.nn.Module:
    """Try a model, or return the earlier result if the model has not changed.

    Args:
        model: the model, in evaluation mode.
        pool: the memory of the first tier.
        state: the model's state, if known to the caller.

    Returns:
        The innermost module called with the tokens and the cache.

    Raises:
        ConfigError: the model does not run on a cache of K and V, hands over unexpected layers or
            formats, or its K and V depend on later tokens.
    """
    known = _entries.get(model, state)
    cached = None if known is None else known()
    if cached is not None:
        return cached
    cache, name = _Recorder(pool), type(model.base_model).__name__
    ids = torch.arange(_TOKENS, device=model.device)[None]
    entered = run_pass(model, cache, ids, 0)[1]
    if not cache.given:
        raise ConfigError(
            f"{type(model).__name__} runs without the cache that it is given: it keeps none, or "
            "puts another one in its place, as prefix tuning does"
        )
    if cache.given != list(range(pool.layers)):
        raise ConfigError(
            f"{name} caches layers {cache.given}, 0 to {pool.layers - 1} once each are wanted"
        )
    if not entered:
        raise ConfigError(
            f"no module of {type(model).__name__} takes both input_ids and past_key_values by "
            "these names, so its tokens are not seen"
        )
    other = _Recorder(pool)
    run_pass(model, other, 2 * ids, 0)
    _check_causal(name, cache, other)
    _entries.put(model, ref(entered[-1]))
    return entered[-1]


def _check_causal(name: str, one: _Recorder, other: _Recorder) -> None:
    """Refuse a model if K and V of the first token depend on the second token."""
    for at, (mine, theirs) in enumerate(zip(one.first, other.first, strict=True)):
        apart = float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-9))
        allowed = max(_APART, 4 * torch.finfo(one.pool.keys.dtype).eps)
        if not apart <= allowed:
            raise ConfigError(
                f"{name} sees later tokens as well: {'KV'[at % 2]} of token 0 in layer {at // 2} "
                f"differs by {apart:.1e} with the token after it, rounding explains "
                f"{allowed:.1e}; only causal models can share the KV of a prefix"
            )


def run_pass(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, start: int
) -> tuple[Any, list[torch.nn.Module]]:
    """Run a pass over tokens after `start` cached tokens.

    Args:
        model: the model, in evaluation mode.
        cache: passed to the model unchanged.
        ids: int64 `(1, n)`, the tokens.
        start: position of the first token.

    Returns:
        The model's output, and the modules called with the tokens and the cache, outermost first.

    Raises:
        ConfigError: the model does not run on the cache.
    """
    positions = torch.arange(start, start + ids.shape[1], device=model.device)[None]
    entered: list[torch.nn.Module] = []

    def note(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch passes no keywords to a hook added or removed during a concurrent pass.
        if kwargs is not None and any(one is cache for one in (*args, *kwargs.values())):
            given = named(module, args, kwargs)
            if given.get("past_key_values") is cache and given.get("input_ids") is not None:
                entered.append(module)

    # Hook all modules: a wrapper may call the wrapped module without its hooks.
    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in cast("Iterable[torch.nn.Module]", model.modules())
    ]
    try:
        with torch.no_grad():
            output = model(input_ids=ids, position_ids=positions, past_key_values=cache)
    except ConfigError:
        raise
    except _UNFIT as error:
        raise ConfigError(
            f"{type(model.base_model).__name__} does not run on a cache of K and V alone: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return output, entered
