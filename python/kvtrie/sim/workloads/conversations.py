"""Small trace of interleaved conversations, for tests and examples.

Invariant: the same seed gives the same trace everywhere. Cost: linear in the number of blocks.
"""

from __future__ import annotations

import random

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads.draw import NS_PER_S

__all__ = ["conversations"]


def conversations(
    *,
    seed: int = 0,
    chats: int = 40,
    turns: int = 4,
    active: int = 8,
    system_blocks: int = 4,
    turn_blocks: int = 3,
    block_tokens: int = 512,
) -> list[TraceRequest]:
    """Return a small trace of interleaved conversations, in whole blocks.

    Args:
        seed: seed of all draws.
        chats: number of conversations.
        turns: maximum number of turns. Each conversation has 1 to `turns`.
        active: number of active conversations. The next turn is from any of them.
        system_blocks: initial blocks shared by all conversations.
        turn_blocks: maximum blocks added by a turn. Each turn adds 1 to `turn_blocks`.
        block_tokens: tokens per block, for the lengths.

    Raises:
        ConfigError: a number below 1, except for `system_blocks` of 0.
    """
    counts = {"chats": chats, "turns": turns, "active": active, "turn_blocks": turn_blocks}
    for name, count in {**counts, "block_tokens": block_tokens}.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}, at least 1 wanted")
    if system_blocks < 0:
        raise ConfigError(f"system_blocks is {system_blocks}, at least 0 wanted")
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    system = list(range(system_blocks))
    fresh = system_blocks
    unopened = chats
    opened: list[tuple[list[int], int]] = []
    requests: list[TraceRequest] = []
    at = 0
    while unopened or opened:
        while unopened and len(opened) < active:
            opened.append((list(system), rng.randint(1, turns)))
            unopened -= 1
        chat = rng.randrange(len(opened))
        path, left = opened[chat]
        added = rng.randint(1, turn_blocks)
        path.extend(range(fresh, fresh + added))
        fresh += added
        at += rng.randrange(NS_PER_S)
        requests.append(
            TraceRequest(
                at=at,
                input_tokens=len(path) * block_tokens,
                output_tokens=rng.randrange(block_tokens),
                blocks=np.array(path, dtype=np.uint32),
            )
        )
        if left > 1:
            opened[chat] = (path, left - 1)
        else:
            opened.pop(chat)
    return requests
