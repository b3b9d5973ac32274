"""Prefill: full computation of a sequence, for missing chunks and for the gate.

Invariant: K and V equal a full prefill of the sequence. Cost: the pass over the tokens from `start`
on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.fuse.layers import DecoderLayers

    Past = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    Write = Callable[[int, torch.Tensor, torch.Tensor], None]

__all__ = ["compute"]


@torch.no_grad()
def compute(
    decoder: DecoderLayers,
    ids: torch.Tensor,
    write: Write,
    *,
    start: int = 0,
    past: Past | None = None,
) -> torch.Tensor:
    """Compute tokens of a sequence from `start` on, all layers.

    Args:
        decoder: the model.
        ids: int64 `(T,)`, the whole sequence.
        write: takes the index of a layer, its K `(T - start, kv_heads, head_dim)` and its V.
        start: number of first tokens with KV.
        past: returns K and V `(start, ...)` of the first tokens at a layer.

    Returns:
        Output `(T - start, hidden)` of the last layer.
    """
    places = torch.arange(start, len(ids), device=decoder.device)
    hidden = decoder.embed(ids[start:])
    for layer in range(decoder.layers):

        def merge(
            keys: torch.Tensor, values: torch.Tensor, layer: int = layer
        ) -> tuple[torch.Tensor, torch.Tensor]:
            write(layer, keys, values)
            if past is None or not start:
                return keys, values
            before = past(layer)
            return torch.cat([before[0], keys]), torch.cat([before[1], values])

        hidden = decoder.layer(layer, hidden, places, len(ids), merge)
    return hidden
