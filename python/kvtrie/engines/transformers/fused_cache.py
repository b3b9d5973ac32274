"""FusedCache: a transformers `Cache` over the K and V of a fused cache.

Invariant: the cache starts with the fused tokens. Tokens of later passes follow, and no request
matches them. Cost: per pass and layer one write of the new tokens and one read of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvtrie.engines.identity.model_state import ModelState
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.fuse.backing import FusedMemory

__all__ = ["FusedCache"]


class FusedCache(Cache):
    """Cache of a single sequence, growing with every pass.

    Args:
        kv: memory of K and V.
        length: tokens already in the memory.
        reach: longest sequence with the same RoPE rotation, None for no limit.
        model: the model of the K and V.
    """

    def __init__(
        self, kv: FusedMemory, length: int, reach: int | None, model: torch.nn.Module
    ) -> None:
        super().__init__(layers=[])
        self._model, self._state = model, ModelState.of(model)
        self._kv = kv
        self._reach = reach
        self._past = length

    def __len__(self) -> int:
        return self._kv.layers

    def __repr__(self) -> str:
        return f"FusedCache({self._past} tokens)"

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K, V `(1, heads, queries, dim)` of a layer. Return K, V of all tokens.

        Raises:
            ClosedError: the fused cache is closed.
            ConfigError: a batch of several rows, a length with a different RoPE rotation, or a
                model changed since the fusion.
            NoSpaceError: no room for the new tokens. The pass may be tried again later.
        """
        rows, queries = key_states.shape[0], key_states.shape[2]
        if rows != 1:
            raise ConfigError(
                f"a fused cache holds one sequence, the pass has {rows}: fuse once for each"
            )
        end = self._past + queries
        if self._reach is not None and end > self._reach:
            raise ConfigError(
                f"RoPE of this model depends on the length: the fused keys are rotated for up to "
                f"{self._reach} tokens, and a pass reaches {end}; read such a sequence in one "
                "prefill, without fusion"
            )
        if layer_idx == 0:
            if not ModelState.of(self._model).same(self._state):
                raise ConfigError(
                    f"the model has changed since its {self._past} tokens were fused: fuse again"
                )
            self._kv.reserve(end)
        places = torch.arange(self._past, end, device=key_states.device)
        new = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._kv.write(layer_idx, places, *new)
        keys, values = self._kv.read(layer_idx, end)
        if layer_idx == self._kv.layers - 1:
            self._past = end
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers hold the same
        """Return the number of cached tokens."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of keys visible to `query_length` tokens, and their first index."""
        return self._past + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """-1: the sequence grows as long as there is room."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. transformers passes a negative number."""
        if tokens_to_remove > 0 or -tokens_to_remove > self._past:
            raise ConfigError(f"cannot crop by {tokens_to_remove} of {self._past} tokens")
        self._past += tokens_to_remove
