"""Padding: where each row of a batch begins, as the masks of its passes say.

Invariant: a row begins at the same column in all of its passes. Cost: a look at the mask.
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
    """Return where each row begins, int64 `(batch,)`; None where no mask says so.

    Args:
        mask: of the pass.
        batch: rows of the pass.
        past: columns that were read before.
        new: columns of the pass.
        earlier: what the passes before returned.
        times: rows of this pass for each row of those.

    Raises:
        ConfigError: a mask of another shape, with holes, or with other padding than before.
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
