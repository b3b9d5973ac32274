"""Attention to rows of a cache, with weights, compared with torch's kernel without weights.

Rows stand in random order; torch's kernel takes the same mask, which it is given. Heads are those
of an 8B model: 32 of queries, 8 of K and V, of 128 numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benches.gpu.clock import Row
from kvtrie.kernels import attend, attend_masked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.gpu.clock import Clock

HEADS, GROUPS, DIM = 32, 8, 128
SHAPES = ((1, 4096), (128, 4096), (1024, 4096), (1024, 16_384))
PEER = "torch's masked SDPA, no weights"


def measure(clock: Clock, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[Row]:
    """Both kernels and the first alone, at each number of queries and rows."""
    for new, rows in shapes:
        query = torch.randn(1, HEADS, new, DIM, device=clock.device).bfloat16()
        keys, values = torch.randn(2, 1, GROUPS, rows, DIM, device=clock.device).bfloat16()
        pos = torch.rand(1, GROUPS, rows, device=clock.device).argsort(dim=-1)
        place = {"token_pos": pos, "input_pos": rows - new}
        peer = clock.seconds(lambda: attend_masked(query, keys, values, **place))  # noqa: B023
        for weights in (False, True):
            mine = clock.seconds(
                lambda: attend(query, keys, values, **place, return_attn_weights=weights)  # noqa: B023
            )
            what = f"attend{' and weights' if weights else ''}, {new} queries, {rows} rows"
            yield Row(what, mine * 1e6, "µs", PEER, peer / mine)
