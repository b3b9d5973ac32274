"""KV of the simulated model: bytes that are a function of the tokens before.

Invariant: the KV of a block depends on all tokens up to its end, so a wrong block shows in any
process that finds it. Cost: one hash per block.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves its functions untyped)

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

import torch

from examples.cluster.model import SHAPE, SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

_VALUES = (SHAPE.layers, 2, SIZE, SHAPE.kv_heads, SHAPE.head_dim)
_NUMBERS = SHAPE.layers * 2 * SIZE * SHAPE.kv_heads * SHAPE.head_dim


def prefill(tokens: Sequence[int]) -> torch.Tensor:
    """Return the KV of the full blocks of a prompt, `(layers, 2, tokens, heads, dim)`."""
    before, blocks = b"", [torch.empty(SHAPE.layers, 2, 0, SHAPE.kv_heads, SHAPE.head_dim)]
    for end in range(SIZE, len(tokens) + 1, SIZE):
        block = hashlib.shake_256(before + array("I", tokens[end - SIZE : end]).tobytes())
        before, values = block.digest(32), bytearray(block.digest(_NUMBERS))
        blocks.append(torch.frombuffer(values, dtype=torch.uint8).view(_VALUES).float())
    return torch.cat(blocks, dim=2)
