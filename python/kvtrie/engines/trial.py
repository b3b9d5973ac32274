"""Trial: a pass of two tokens that shows how a model hands its KV to a cache.

Configurations do not say all: models repeat heads before they cache them, share layers, keep states
of other kinds, pass their own base by. A model is tried once, when its first cache is opened.
Invariant: what a model hands over in the trial is what the first tier holds, layer by layer.
Cost: a forward pass over two tokens per model object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from transformers import Cache

from kvtrie.engines.guard import states
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.tiers import Pool

__all__ = ["trial"]

# Of each model that has been tried, the module that its passes enter.
_entries: WeakKeyDictionary[PreTrainedModel, ref[torch.nn.Module]] = WeakKeyDictionary()
# What a model raises that finds another cache than it wants. Memory that runs out is no verdict.
_UNFIT = (AttributeError, IndexError, KeyError, TypeError, ValueError, NotImplementedError)


class _Recorder(Cache):
    """A cache of one pass, which notes the layers that it is given."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self.given: list[int] = []

    def __len__(self) -> int:
        return self._pool.layers

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states(key_states, value_states, self._pool)
        self.given.append(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - empty before the pass
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0


def trial(model: PreTrainedModel, pool: Pool) -> torch.nn.Module:
    """Try a model, unless that has been done before.

    Args:
        model: in evaluation mode.
        pool: the memory of the first tier.

    Returns:
        The module that is given the tokens and the cache: the model's base, or its decoder where
        the model passes its base by.

    Raises:
        ConfigError: it does not run on such a cache, or hands over other K and V, other layers.
    """
    known = _entries.get(model, lambda: None)()
    if known is not None:
        return known
    cache, name = _Recorder(pool), type(model.base_model).__name__
    positions = torch.arange(2, device=model.device)[None]
    entered: list[torch.nn.Module] = []
    hook = model.base_model.register_forward_pre_hook(lambda module, _: entered.append(module))
    try:
        with torch.no_grad():
            model(input_ids=positions, position_ids=positions, past_key_values=cache)
    except ConfigError:
        raise
    except _UNFIT as error:
        raise ConfigError(f"{name} does not run on a cache of K and V alone: {error}") from error
    finally:
        hook.remove()
    if cache.given != list(range(pool.layers)):
        raise ConfigError(
            f"{name} caches layers {cache.given}, 0 to {pool.layers - 1} once each are wanted"
        )
    entry = entered[0] if entered else cast("torch.nn.Module", cast("Any", model).get_decoder())
    _entries[model] = ref(entry)
    return entry
