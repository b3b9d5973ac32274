"""A simulated model: its sizes, its times, and its answers, which are a function of the prompt.

Cost: one hash per answer; the time that a GPU would take is slept.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from kvtrie import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 16
"""Tokens per block."""

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=16, fingerprint="examples.cluster")
VOCABULARY = 50_000
PREFILL_S = 2e-4
"""Seconds per token that a prefill computes."""

DECODE_S = 1e-3
"""Seconds per token of an answer."""


def answer(tokens: Sequence[int], count: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    digest = hashlib.shake_256(array("I", tokens).tobytes()).digest(4 * count)
    return [number % VOCABULARY for number in memoryview(digest).cast("I")]
