"""Recovery: the KV that was dropped inside a cached prefix, computed again at its own positions.

Every missing token of a prefix goes through the model in one pass, wherever the holes are: queries
carry their own positions, keys are in logical order, and a query sees the keys at positions up
to its own (Pensieve, section 4.3.4, recovers dropped tokens the same way). The pass ends at the
deepest layer that misses a token: the layers above are complete.
Invariant: only missing (layer, position) pairs are written, so what is reused stays bit-identical.
Cost: one forward over the missing tokens, with attention over the prefix up to the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from kvtrie.engines.transformers.mask import masks
from kvtrie.engines.transformers.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie import Lease
    from kvtrie.tiers import Pool

__all__ = ["recover"]


def recover(
    model: PreTrainedModel,
    entry: torch.nn.Module,
    pool: Pool,
    lease: Lease,
    tokens: NDArray[Any],
    *,
    reach: int | None = None,
    end: int | None = None,
) -> int:
    """Compute what the plan of `lease` says is missing in front of its match, or what follows it.

    The lease must be ready: everything that the plan reuses or loads is in its slots.

    Args:
        model: a causal language model or its decoder.
        entry: the module of it that is given tokens and a cache.
        pool: the memory of the first tier.
        lease: whose plan to carry out.
        tokens: int64 `(n,)`, the prompt, at least up to the match.
        reach: a position that the pass must contain so that it rotates as the whole prompt did;
            None where rotations depend on their own positions alone.
        end: compute the tokens from the last one that the lease holds up to here instead, for which
            it has room; the caller commits them.

    Returns:
        The number of tokens that were computed; 0 where nothing was missing.

    Raises:
        ConfigError: a kind of layer whose mask is not known here, or an implementation of
            attention that takes no mask.
    """
    device = pool.device
    if end is not None:
        missing = torch.arange(lease.tokens, end, device=device)
        per_layer = [missing] * pool.layers
    else:
        missing = torch.from_numpy(lease.plan.recompute()).to(device)  # type: ignore[no-untyped-call]
        per_layer = [
            torch.from_numpy(lease.plan.recompute(layer)).to(device)  # type: ignore[no-untyped-call]
            for layer in range(pool.layers)
        ]
    if not len(missing):
        return 0
    step = Step.of_positions(pool, pool.table(lease.slots(0)), missing, per_layer)
    last = max(layer for layer, positions in enumerate(per_layer) if len(positions))
    ids, positions = torch.as_tensor(tokens, device=device)[missing], missing
    if reach is not None and int(missing[-1]) < reach:
        # A query more, of any token: its K and V are not written, and no other query sees them.
        ids = torch.cat([ids, ids[-1:]])
        positions = torch.cat([missing, missing.new_tensor([reach])])
    try:
        with torch.no_grad():
            entry(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=masks(model, positions, step.keys),
                past_key_values=_Missing(step, last),
                use_cache=True,
            )
    except _Complete:
        pass
    return len(missing)


class _Complete(Exception):  # noqa: N818 - not an error: the pass has done its work
    """Nothing is missing above this layer."""


class _Missing(Cache):
    """The model's cache during the pass."""

    def __init__(self, step: Step, last: int) -> None:
        super().__init__(layers=[])
        self._step = step
        self._last = last

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._step.write(layer_idx, key_states, value_states)
        if layer_idx == self._last:
            raise _Complete
        return self._step.read(layer_idx)
