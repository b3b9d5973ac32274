"""Synthetic traces of requests to a prefix cache, by families.

`chats` are conversations of many turns, `agents` work through tools and pause for them, `shared`
are single questions after popular documents, `flood` is chats with waves of prompts that never
come again. A prompt begins with all full blocks of the turn before; its last block is partial and
unique, as in the published traces.
Invariant: the same seed gives the same trace everywhere. Cost: linear in the number of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.sim.workloads.draw import NS_PER_S, Draw, Text, begin, gathered, opened, ordered, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtrie.sim.trace import TraceRequest

__all__ = ["FAMILIES", "agents", "chats", "flood", "shared"]


def _chat(draw: Draw, system: Text, at: float) -> Iterator[TraceRequest]:
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
    """Conversations of four turns in the mean, after one of eight system prompts.

    People think for a minute between turns (median; a tenth for more than five), 2 % upload a
    document of about 12 000 tokens first, and 5 % of the turns are asked again in other words.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = begin(requests, seed)
    systems = texts(draw, ids, 8, 1500, 0.8)

    def sessions() -> Iterator[list[TraceRequest]]:
        for at in opened(draw, 1.0):
            system = systems[draw.popular(len(systems))].fork()
            if draw.happens(0.02):
                system.grow(draw.length(12_000, 0.6))
            yield list(_chat(draw, system, at))

    return gathered(sessions(), requests, 1.2)


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
    draw, ids = begin(requests, seed)
    kinds = texts(draw, ids, 5, 6000, 0.4)

    def steps(at: float) -> Iterator[TraceRequest]:
        text = kinds[draw.popular(len(kinds))].fork()
        text.grow(draw.length(800, 0.8))
        for _ in range(draw.turns(12)):
            answer = draw.length(120, 0.8)
            yield text.request(at, answer)
            text.grow(answer + draw.length(500, 1.1))
            slow = draw.happens(1 / 8)
            at += draw.seconds(240, 1) if slow else draw.seconds(4, 0.8)

    sessions = (list(steps(at)) for at in opened(draw, 0.25))
    return gathered(sessions, requests, 1.2)


def shared(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Single questions after popular documents, whose popularity changes.

    Three hundred documents of about 5 000 tokens after one of six system prompts; every hundred
    requests the popular ones change by one. One in five questions has a second turn.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = begin(requests, seed)
    systems = texts(draw, ids, 6, 1000, 0.5)

    def document() -> Text:
        text = systems[draw.popular(len(systems))].fork()
        text.grow(draw.length(5000, 0.7))
        return text

    shelf = [document() for _ in range(300)]

    def sessions() -> Iterator[list[TraceRequest]]:
        for number, at in enumerate(opened(draw, 2.0), 1):
            if number % 100 == 0:
                shelf.insert(draw.rng.randrange(30), document())
                shelf.pop()
            text = shelf[draw.popular(len(shelf))].fork()
            text.grow(draw.length(150, 0.8))
            answer = draw.length(200, 0.7)
            turns = [text.request(at, answer)]
            if draw.happens(0.2):
                text.grow(answer + draw.length(100, 0.8))
                turns.append(text.request(at + draw.seconds(40, 1), answer))
            yield turns

    return gathered(sessions(), requests, 1.1)


def flood(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Chats, and every ten minutes a wave of long prompts that never come back.

    A wave is a job of about three hundred prompts of about 4 000 tokens within a minute.

    Args:
        requests: how many.
        seed: of all choices.

    Raises:
        ConfigError: `requests` is below 1.
    """
    draw, ids = begin(requests, seed)
    made = chats(requests=requests, seed=seed + 1)
    own = 1 + max(int(request.blocks.max()) for request in made)
    for _ in range(own):
        next(ids)
    end = made[-1].at / NS_PER_S
    for wave in range(int(end // 600) + 1):
        for _ in range(draw.length(300, 0.3)):
            text = Text(ids)
            text.grow(draw.length(4000, 0.7))
            made.append(text.request(600 * wave + 300 + draw.rng.uniform(0, 60), 50))
    return ordered(made, requests)


FAMILIES: dict[str, Callable[..., list[TraceRequest]]] = {
    "chats": chats,
    "agents": agents,
    "shared": shared,
    "flood": flood,
}
"""The families by name; each takes `requests` and `seed`."""
