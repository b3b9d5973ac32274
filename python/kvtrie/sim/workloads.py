"""Synthetic traces of requests to a prefix cache, by families.

`chats` are conversations of many turns, `agents` work through tools and pause for them, `shared`
are single questions behind popular documents, `flood` is chats with waves of prompts that nobody
asks for again. `conversations` is small, for tests and examples. A prompt begins with all full
blocks of the turn before; its last block is partial and its own, as in the published traces.
Invariant: the same seed gives the same trace everywhere. Cost: linear in the number of blocks.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FAMILIES", "agents", "chats", "conversations", "flood", "shared"]

_NS_PER_S = 1_000_000_000
_BLOCK = 512


@dataclass(slots=True)
class _Text:
    """A sequence that grows, as ids of its full blocks and a rest of tokens."""

    ids: Iterator[int]
    path: list[int] = field(default_factory=list[int])
    rest: int = 0

    def grow(self, tokens: int) -> None:
        """Append tokens that are in no earlier text."""
        whole, self.rest = divmod(self.rest + tokens, _BLOCK)
        self.path.extend(next(self.ids) for _ in range(whole))

    def fork(self) -> _Text:
        """A sequence that begins with the full blocks of this one."""
        return _Text(self.ids, list(self.path))

    def request(self, at: float, answer: int) -> TraceRequest:
        """A prompt of all of it."""
        partial = [next(self.ids)] if self.rest or not self.path else []
        return TraceRequest(
            at=int(at * _NS_PER_S),
            input_tokens=len(self.path) * _BLOCK + self.rest,
            output_tokens=answer,
            blocks=np.array(self.path + partial, dtype=np.uint32),
        )


@dataclass(slots=True)
class _Draw:
    """Random numbers of the shapes that workloads have."""

    rng: random.Random

    def length(self, median: float, spread: float) -> int:
        """A log-normal length, at least 1."""
        return max(1, round(self.rng.lognormvariate(math.log(median), spread)))

    def seconds(self, median: float, spread: float) -> float:
        """A log-normal time."""
        return self.rng.lognormvariate(math.log(median), spread)

    def happens(self, share: float) -> bool:
        """True that often."""
        return self.rng.random() < share

    def turns(self, mean: float) -> int:
        """A geometric number, at least 1."""
        return 1 + int(math.log(1 - self.rng.random()) / math.log(1 - 1 / mean))

    def popular(self, number: int) -> int:
        """One of `number`; the n-th is asked for about 1/n as often as the first (Zipf)."""
        return int((number + 1) ** self.rng.random()) - 1


def _ordered(requests: list[TraceRequest], most: int) -> list[TraceRequest]:
    """By time; the first `most`, so that late turns of the last sessions are cut off."""
    return sorted(requests, key=lambda request: request.at)[:most]


def _gathered(
    sessions: Iterator[list[TraceRequest]], most: int, surplus: float
) -> list[TraceRequest]:
    """Sessions until there are more than `surplus * most` requests, in order of time."""
    made: list[TraceRequest] = []
    while len(made) <= surplus * most:
        made.extend(next(sessions))
    return _ordered(made, most)


def _texts(
    draw: _Draw, ids: Iterator[int], number: int, median: float, spread: float
) -> list[_Text]:
    """So many unrelated texts."""
    texts = [_Text(ids) for _ in range(number)]
    for text in texts:
        text.grow(draw.length(median, spread))
    return texts


def _opened(draw: _Draw, per_s: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += draw.rng.expovariate(per_s)
        yield at


def _chat(draw: _Draw, system: _Text, at: float) -> Iterator[TraceRequest]:
    text = system.fork()
    for _ in range(draw.turns(4)):
        before = text.fork()
        text.grow(draw.length(400, 1.2))
        answer = draw.length(300, 0.9)
        yield text.request(at, answer)
        if draw.happens(0.05):  # asked again in other words
            text = before
            text.grow(draw.length(400, 1.2))
            at += draw.seconds(20, 1)
            yield text.request(at, answer)
        text.grow(answer)
        at += draw.seconds(60, 1.3)


def chats(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Conversations of four turns in the mean, behind one of eight system prompts.

    People think for a minute between turns (median; a tenth for more than five), 2 % upload a
    document of about 12 000 tokens first, and 5 % of the turns are asked again in other words.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = _begin(requests, seed)
    systems = _texts(draw, ids, 8, 1500, 0.8)

    def sessions() -> Iterator[list[TraceRequest]]:
        for at in _opened(draw, 1.0):
            system = systems[draw.popular(len(systems))].fork()
            if draw.happens(0.02):
                system.grow(draw.length(12_000, 0.6))
            yield list(_chat(draw, system, at))

    return _gathered(sessions(), requests, 1.2)


def agents(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Agents that call tools: long prompts that grow by small steps, with pauses of two kinds.

    An agent of one of five kinds (instructions and tools of about 6 000 tokens) takes twelve steps
    in the mean. Most tools answer in seconds; one in eight, a build or a person, takes minutes.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = _begin(requests, seed)
    kinds = _texts(draw, ids, 5, 6000, 0.4)

    def steps(at: float) -> Iterator[TraceRequest]:
        text = kinds[draw.popular(len(kinds))].fork()
        text.grow(draw.length(800, 0.8))
        for _ in range(draw.turns(12)):
            answer = draw.length(120, 0.8)
            yield text.request(at, answer)
            text.grow(answer + draw.length(500, 1.1))
            slow = draw.happens(1 / 8)
            at += draw.seconds(240, 1) if slow else draw.seconds(4, 0.8)

    sessions = (list(steps(at)) for at in _opened(draw, 0.25))
    return _gathered(sessions, requests, 1.2)


def shared(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Single questions behind popular documents, whose popularity moves on.

    Three hundred documents of about 5 000 tokens behind one of six system prompts; every hundred
    requests the popular ones change by one. One in five questions has a second turn.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = _begin(requests, seed)
    systems = _texts(draw, ids, 6, 1000, 0.5)

    def document() -> _Text:
        text = systems[draw.popular(len(systems))].fork()
        text.grow(draw.length(5000, 0.7))
        return text

    shelf = [document() for _ in range(300)]

    def sessions() -> Iterator[list[TraceRequest]]:
        for number, at in enumerate(_opened(draw, 2.0), 1):
            if number % 100 == 0:
                shelf.insert(draw.rng.randrange(30), document())
                shelf.pop()
            text = shelf[draw.popular(len(shelf))].fork()
            text.grow(draw.length(150, 0.8))
            answer = draw.length(200, 0.7)
            asked = [text.request(at, answer)]
            if draw.happens(0.2):
                text.grow(answer + draw.length(100, 0.8))
                asked.append(text.request(at + draw.seconds(40, 1), answer))
            yield asked

    return _gathered(sessions(), requests, 1.1)


def flood(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Chats, and every ten minutes a wave of long prompts that never come back.

    A wave is a job of about three hundred prompts of about 4 000 tokens within a minute.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = _begin(requests, seed)
    made = chats(requests=requests, seed=seed + 1)
    own = 1 + max(int(request.blocks.max()) for request in made)
    for _ in range(own):
        next(ids)
    end = made[-1].at / _NS_PER_S
    for wave in range(int(end // 600) + 1):
        for _ in range(draw.length(300, 0.3)):
            text = _Text(ids)
            text.grow(draw.length(4000, 0.7))
            made.append(text.request(600 * wave + 300 + draw.rng.uniform(0, 60), 50))
    return _ordered(made, requests)


FAMILIES: dict[str, Callable[..., list[TraceRequest]]] = {
    "chats": chats,
    "agents": agents,
    "shared": shared,
    "flood": flood,
}
"""The families by name; each takes `requests` and `seed`."""


def _begin(requests: int, seed: int) -> tuple[_Draw, Iterator[int]]:
    if requests < 1:
        raise ConfigError(f"requests is {requests}, at least 1 wanted")
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    return _Draw(rng), itertools.count()


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
    """A small trace of interleaved conversations, in whole blocks.

    Args:
        seed: of all choices.
        chats: how many conversations.
        turns: the most turns of one; each has 1 to that many.
        active: conversations that are open at a time; any of them takes the next turn.
        system_blocks: blocks at the start that all conversations share.
        turn_blocks: the most blocks that a turn adds; each adds 1 to that many.
        block_tokens: tokens of a block, for the lengths.

    Raises:
        ConfigError: a number below 1; only `system_blocks` may be 0.
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
        at += rng.randrange(_NS_PER_S)
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
