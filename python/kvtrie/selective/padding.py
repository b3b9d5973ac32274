"""Padding: the first column of each row of a batch, from the masks of its passes.

Invariant: a row begins at the same column in all of its passes. Cost: a read of the mask.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves parts untyped)

from __future__ import annotations

import torch

from kvtrie.errors import ConfigError

__all__ = ["first_columns"]


def first_columns(  # noqa: PLR0917 - of one pass
    mask: torch.Tensor | None,
    batch: int,
    past: int,
    new: int,
    earlier: torch.Tensor | None,
    times: int,
) -> torch.Tensor | None:
    """Return the first column of each row, int64 `(batch,)`, or None without a mask.

    Args:
        mask: attention mask of the pass.
        batch: rows of the pass.
        past: columns read before.
        new: columns of the pass.
        earlier: result of the previous passes.
        times: rows of this pass per row of the previous passes.

    Raises:
        ConfigError: a mask of a wrong shape, with holes, or with padding changed since the first
            pass.
    """
    if earlier is not None and past:
        earlier = earlier.repeat_interleave(times)
    if mask is None:
        return earlier if past else None
    # A pass that repeats earlier tokens has only the columns of the repeated tokens.
    width = new if mask.shape == (batch, new) else past + new
    if mask.shape != (batch, width):
        raise ConfigError(
            f"attention_mask is {tuple(mask.shape)}, {(batch, width)} wanted: rows and all "
            "columns that were read"
        )
    seen = mask != 0
    first = width - seen.sum(dim=1)
    places = torch.arange(width, device=mask.device)
    if not torch.equal(seen, places >= first[:, None]):
        raise ConfigError("attention_mask hides columns after a row's first token: pad on the left")
    if past:
        before = [0] * batch
        if earlier is not None:
            before = [int(columns) for columns in earlier.clamp(max=past)]
        if first.clamp(max=past).tolist() != before:
            raise ConfigError(
                f"attention_mask says {first.tolist()} columns of padding, that of the passes "
                f"before said {before}"
            )
    return first
