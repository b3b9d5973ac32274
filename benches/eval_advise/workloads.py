"""Workloads of `eval-advise`: chats, and agents with tools, in tokens of a random model.

Invariant: turns of one conversation are `APART_S` apart and add two blocks or more, so that a turn
is not taken for a part of the one before. The same seed gives the same prompts. Cost: none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS, LONGEST = 512, 1200
APART_S = 3.0


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        at: seconds from the begin of the workload, at least.
        who: its conversation.
        begin: tokens that a new conversation begins with; empty in later turns.
        added: tokens that it adds to the conversation.
        answer: tokens of its answer, which the next turn has too.
    """

    at: float
    who: int
    begin: list[int]
    added: list[int]
    answer: int


def chats(seed: int = 1, number: int = 10, turns: int = 8) -> Iterator[Turn]:
    """Chats that share a system prompt, in another order each round."""
    draw = random.Random(seed)
    shared = words(draw, 96)
    for turn in range(turns):
        for at, who in enumerate(rotated(draw, number)):
            begin = [] if turn else shared
            seconds = (turn * number + at) * 2 * APART_S / number
            yield Turn(seconds, who, begin, words(draw, draw.randint(64, 120)), draw.randint(8, 16))


def agents(seed: int = 2, number: int = 5, steps: int = 16) -> Iterator[Turn]:
    """Agents that share long tools, whose steps add results; each ends at its longest prompt."""
    draw = random.Random(seed)
    tools, lengths = words(draw, 200), [0] * number
    for step in range(steps):
        for at, who in enumerate(rotated(draw, number)):
            added = words(draw, draw.choice((64, 80, 160)))
            new = not lengths[who] or lengths[who] + len(added) > LONGEST - 20
            begin = [*tools, *words(draw, 40)] if new else []
            answer = draw.randint(4, 12)
            lengths[who] = (len(begin) if new else lengths[who]) + len(added) + answer
            seconds = (step * number + at) * 2 * APART_S / number
            yield Turn(seconds, who, begin, added, answer)


WORKLOADS = {"chats": chats, "agents": agents}


def rotated(draw: random.Random, number: int) -> list[int]:
    """An order in which neighbours of the order before stay at least half a round apart."""
    half = number // 2
    first, second = list(range(half)), list(range(half, number))
    draw.shuffle(first)
    draw.shuffle(second)
    return [*first, *second]


def words(draw: random.Random, number: int) -> list[int]:
    """Random tokens."""
    return [draw.randrange(1, WORDS) for _ in range(number)]
