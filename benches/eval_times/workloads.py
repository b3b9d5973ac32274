"""Workloads of `eval-times`: recordings on a scale that one processor core serves.

A recorded block becomes a few tokens, the same for the same block, so prompts begin alike exactly
where the recorded ones do. Of chats and documents whole conversations are left out until the rest
is as dense as wanted, of agents all but some requests of each session; times are pressed into the
length of a run.
Invariant: equal arguments give equal prompts; answers are never part of a later prompt. Cost: one
pass over the recording.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["WORKLOADS", "Ask", "Workload", "write_trace"]

VOCABULARY = 8192
MOST_PROMPT, LEAST_PROMPT = 2000, 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        at: seconds from the begin.
        who: its conversation.
        blocks: ids of the recorded blocks.
        answer: tokens of the answer.
    """

    at: float
    who: int
    blocks: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A recording on a smaller scale.

    Attributes:
        read: the requests of a file, in its order.
        window_s: the seconds of the recording that are played.
        thinned: what is left out to have fewer requests: "conversations" or "requests".
        turns: the fewest requests of a conversation that is played.
        block: tokens that a recorded block becomes.
        answers: recorded tokens of an answer that become one.
        pool: blocks of the engine's own cache.
        host: blocks of host memory.
    """

    read: Callable[[Path], Iterable[Ask]]
    window_s: tuple[float, float]
    thinned: str
    turns: int
    block: int
    answers: int
    pool: int
    host: int

    def asks(self, path: Path, count: int, span_s: float) -> list[Ask]:
        """Return `count` requests that arrive within `span_s`.

        Raises:
            ValueError: the recording has fewer.
        """
        begin_s, end_s = self.window_s
        window = [ask for ask in self.read(path) if begin_s <= ask.at < end_s]
        fits = [ask for ask in window if LEAST_PROMPT <= len(ask.blocks) * self.block < MOST_PROMPT]
        if len(fits) < count:
            raise ValueError(f"{path} has {len(fits)} requests of {count} in {self.window_s} s")
        if self.thinned == "requests":
            kept = [fits[at * len(fits) // count] for at in range(count)]
        else:
            kept = _of_whole_conversations(fits, count, self.turns)
        first, last = kept[0].at, kept[-1].at
        scale = span_s / (last - first)
        return [
            replace(ask, at=(ask.at - first) * scale, answer=self._answer(ask.answer))
            for ask in kept
        ]

    def _answer(self, recorded: int) -> int:
        return min(64, max(2, round(recorded / self.answers)))

    def prompt(self, blocks: Sequence[int]) -> list[int]:
        """Return the tokens of recorded blocks."""
        tokens: list[int] = []
        for block in blocks:
            tokens += np.random.default_rng(block).integers(0, VOCABULARY, self.block).tolist()
        return tokens


def _of_whole_conversations(asks: list[Ask], count: int, turns: int) -> list[Ask]:
    """The first `count` requests of as many conversations, chosen by chance, as have them."""
    sizes = {who: size for who, size in Counter(ask.who for ask in asks).items() if size >= turns}
    chosen: set[int] = set()
    for who in np.random.default_rng(0).permutation(sorted(sizes)).tolist():
        if sum(sizes[each] for each in chosen) >= count:
            break
        chosen.add(who)
    return [ask for ask in asks if ask.who in chosen][:count]


def write_trace(path: Path, workload: Workload, asks: Iterable[Ask]) -> None:
    """Write requests as a trace of tokens, as the simulator reads it."""
    with path.open("w") as file:
        for ask in asks:
            row = {"arrival_ns": round(ask.at * 1e9), "tokens": workload.prompt(ask.blocks)}
            file.write(json.dumps(row | {"output_tokens": ask.answer}) + "\n")


def _conversations(path: Path, *, least: int = 0) -> Iterator[Ask]:
    """Requests of the conversation trace; a conversation begins with `least` blocks or more.

    The trace names none: a request goes on with the conversation of the longest beginning that it
    has, beyond the first block, which all share.
    """
    owner: dict[int, int] = {}
    begun: list[int] = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            blocks = tuple(row["hash_ids"])
            known = [owner[block] for block in blocks[1:] if block in owner]
            who = known[-1] if known else len(begun)
            if not known:
                begun.append(len(blocks))
            for block in blocks[1:]:
                owner.setdefault(block, who)
            if begun[who] >= least:
                yield Ask(row["timestamp"] / 1e3, who, blocks, row["output_length"])


def _chats(path: Path) -> Iterator[Ask]:
    return _conversations(path)


def _documents(path: Path) -> Iterator[Ask]:
    return _conversations(path, least=40)


def _agents(path: Path, every: int = 2) -> Iterator[Ask]:
    """Requests of the recorded agents, with one block of `every` that follow each other."""
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            blocks = [block for first, end in row["ranges"] for block in range(first, end)]
            yield Ask(
                row["timestamp"] / 1e3,
                row["session"],
                tuple(blocks[every - 1 :: every]),
                row["output_length"],
            )


WORKLOADS = {
    "chats": Workload(_chats, (600.0, 1200.0), "conversations", 3, 16, 16, pool=128, host=400),
    "documents": Workload(
        _documents, (600.0, 2400.0), "conversations", 2, 16, 16, pool=160, host=600
    ),
    "agents": Workload(_agents, (2700.0, 4500.0), "requests", 1, 1, 32, pool=128, host=300),
}
"""By name; chats and documents are of the conversation trace."""
