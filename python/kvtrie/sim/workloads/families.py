"""Families of synthetic traces for a prefix cache.

`chats` are conversations of many turns, `agents` use tools and pause for them, `shared` are single
questions after popular documents, and `flood` is chats with waves of unique prompts. A prompt
starts with all full blocks of the previous turn. Its last block is partial and unique, as in the
published traces.
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
        if draw.happens(0.05):  # repeated in different words
            text = before
            text.grow(draw.length(400, 1.2))
            at += draw.seconds(20, 1)
            yield text.request(at, answer)
        text.grow(answer)
        at += draw.seconds(60, 1.3)


def chats(*, requests: int = 10_000, seed: int = 0) -> list[TraceRequest]:
    """Return conversations with a mean of four turns, after one of eight system prompts.

    The median think time is a minute (more than five minutes for a tenth of the turns). 2 % of the
    conversations start with a document of about 12 000 tokens, and 5 % of the turns are repeated in
    different words.

    Args:
        requests: number of requests.
        seed: seed of all draws.

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
    """Return agents calling tools: long prompts growing by small steps, with two kinds of pauses.

    An agent has one of five kinds (instructions and tools of about 6 000 tokens) and takes a mean
    of twelve steps. Most tools answer in seconds. An eighth, for example a build or a person, takes
    minutes.

    Args:
        requests: number of requests.
        seed: seed of all draws.

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
    """Return single questions after popular documents with changing popularity.

    Three hundred documents of about 5 000 tokens after one of six system prompts. Every hundred
    requests a popular document is added. A fifth of the questions have a second turn.

    Args:
        requests: number of requests.
        seed: seed of all draws.

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
    """Return chats with a wave of long, unique prompts every ten minutes.

    A wave is a job of about three hundred prompts of about 4 000 tokens within a minute.

    Args:
        requests: number of requests.
        seed: seed of all draws.

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
"""Families by name. Each takes `requests` and `seed`."""
