"""A multi-turn trace: conversations over shared system prompts, many of them open at a time.

The same seed gives the same trace everywhere. Cost: one array per conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How many conversations there are, and how long.

    Attributes:
        conversations: in all.
        open: at a time.
        turns: of each conversation.
        system: tokens of a system prompt.
        systems: different system prompts.
        turn: tokens of a question, and of an answer.
    """

    conversations: int = 400
    open: int = 100
    turns: int = 5
    system: int = 512
    systems: int = 20
    turn: int = 200


def requests(shape: Shape, seed: int = 7) -> Iterator[tuple[NDArray[np.uint32], int]]:
    """Yield prompt and answer of each request as one array, with the prompt's length."""
    draw = np.random.default_rng(seed)
    systems = draw.integers(1, VOCABULARY, (shape.systems, shape.system), dtype=np.uint32)
    told = 2 * shape.turn * shape.turns

    def begin() -> NDArray[np.uint32]:
        system = systems[draw.integers(shape.systems)]
        return np.concatenate([system, draw.integers(1, VOCABULARY, told, dtype=np.uint32)])

    chats = [(begin(), 0) for _ in range(shape.open)]
    begun = shape.open
    while chats:
        at = int(draw.integers(len(chats)))
        text, turn = chats[at]
        prompt = shape.system + (2 * turn + 1) * shape.turn
        yield text[: prompt + shape.turn], prompt
        if turn + 1 < shape.turns:
            chats[at] = (text, turn + 1)
        elif begun < shape.conversations:
            chats[at] = (begin(), 0)
            begun += 1
        else:
            chats.pop(at)
