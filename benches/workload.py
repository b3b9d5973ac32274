"""The common trace: what every benchmark plays, ours and the peers'.

10 000 conversations of 4 to 6 turns start with one of 20 system prompts of 512 tokens; a turn is a
question and an answer of 150 to 250 tokens each. `ACTIVE` conversations are open at a time; at each
step one that is not running takes its next turn; `RUNNING` requests are in flight. With the default
seed: 50 031 requests, mean prompt 95.7 blocks, 4.79 M prompt blocks, 1.25 M of them distinct.

Invariant: the same seed gives the same trace everywhere; needs numpy alone, so that a peer's
interpreter can import it. Cost: a second to make, then one array per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK = 16
ACTIVE = 1000
RUNNING = 64
VOCABULARY = 128_000
SEQUENCE = 32  # blocks of a sequence in bench-scaling
SYSTEM_PROMPTS = 20
SYSTEM_TOKENS = 512
CONVERSATIONS = 10_000
SEED = 1234
# Share of the default trace's prompt blocks that an LRU manager of 100 000 blocks finds. A driver
# that finds another share plays it wrongly.
LRU_POOL = 100_000
LRU_SHARE = 0.815
LRU_WITHIN = 0.002


class Trace:
    """Requests in order of arrival: conversation, prompt length, tokens of prompt and answer."""

    def __init__(self, seed: int = SEED, conversations: int = CONVERSATIONS) -> None:
        draw = np.random.default_rng(seed)
        system = (SYSTEM_PROMPTS, SYSTEM_TOKENS)
        self.system = draw.integers(1, VOCABULARY, size=system, dtype=np.int32)
        turns = draw.integers(4, 7, size=conversations)
        asks = draw.integers(150, 251, size=(conversations, 6))
        answers = draw.integers(150, 251, size=(conversations, 6))
        self.prompt_of = draw.integers(0, SYSTEM_PROMPTS, size=conversations)
        sizes = [int(asks[c, :n].sum() + answers[c, :n].sum()) for c, n in enumerate(turns)]
        self.bodies = [draw.integers(1, VOCABULARY, size=n, dtype=np.int32) for n in sizes]
        self.order = list(_arrivals(draw, turns, asks, answers))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
        for c, ask, end in self.order:
            tokens = np.concatenate([self.system[self.prompt_of[c]], self.bodies[c][:end]])
            yield c, SYSTEM_TOKENS + ask, tokens


def _arrivals(
    draw: np.random.Generator,
    turns: NDArray[np.int64],
    asks: NDArray[np.int64],
    answers: NDArray[np.int64],
) -> Iterator[tuple[int, int, int]]:
    """Yield conversation, end of its question, end of its answer, after the system prompt."""
    length, turn = [0] * len(turns), [0] * len(turns)
    opened = list(range(min(ACTIVE, len(turns))))
    unopened = len(opened)
    running: list[int] = []
    while opened:
        if len(running) >= RUNNING or len(opened) <= len(running):
            running.pop(0)
            if len(opened) <= len(running):
                continue
        while True:
            at = int(draw.integers(0, len(opened)))
            if (c := opened[at]) not in running:
                break
        ask = length[c] + int(asks[c, turn[c]])
        length[c] = ask + int(answers[c, turn[c]])
        yield c, ask, length[c]
        turn[c] += 1
        if turn[c] < turns[c]:
            running.append(c)
        elif unopened < len(turns):
            opened[at] = unopened
            unopened += 1
        else:
            opened[at] = opened[-1]
            opened.pop()
