"""ShareGptLike: conversations with the length distributions of ShareGPT, without its texts.

A conversation has a geometric number of turns, with log-normal texts of the given mean lengths. A
prompt is the whole conversation so far and the next question.
Invariant: the same seed gives the same trace everywhere. Cost: the active conversations are in
memory.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.settings.argument import put, real, whole
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.readers.sharegpt import in_turns
from kvtrie.sim.readers.tables import Prompts
from kvtrie.sim.workloads.draw import Draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.sim.readers.rows import RequestRow

__all__ = ["ShareGptLike"]

_SPREAD = 1.0
_MOST_TOKENS = 1e6


@dataclass(frozen=True, slots=True)
class ShareGptLike:
    """A trace of conversations.

    Attributes:
        requests: total number of turns. The last conversations are cut.
        turns: mean number of turns per conversation.
        input_tokens: mean tokens of a question.
        output_tokens: mean tokens of an answer.
        think_s: mean of the exponential think times between two turns, in seconds.
        arrivals: start times of conversations, or number of clients.
    """

    requests: int = 1000
    turns: float = 5.56
    input_tokens: float = 37.8
    output_tokens: float = 204.6
    think_s: float = 10.0
    arrivals: Arrivals = field(default_factory=Arrivals)

    def __post_init__(self) -> None:
        """Check the settings."""
        put(
            self,
            requests=whole("requests", self.requests, 1, 2**53),
            turns=real("turns", self.turns, 1.001, 1e6),
            input_tokens=real("input_tokens", self.input_tokens, 1, _MOST_TOKENS),
            output_tokens=real("output_tokens", self.output_tokens, 1, _MOST_TOKENS),
            think_s=real("think_s", self.think_s, 0, 1e9),
        )

    def made(self, block_tokens: int, seed: int) -> Iterator[RequestRow]:
        """Yield the requests as block ids."""
        turns = in_turns(
            self._conversations(Prompts(block_tokens), seed),
            self.arrivals.opened(seed),
            self.think_s,
            seed + 1,  # to draw differently from the arrivals
        )
        return itertools.islice(turns, self.requests)

    def _conversations(self, prompts: Prompts, seed: int) -> Iterator[list[RequestRow]]:
        draw = Draw(random.Random(seed + 2))  # noqa: S311 - a workload needs no secrecy
        # The mean of a log-normal length is its median times exp(spread² / 2).
        to_median = math.exp(-(_SPREAD**2) / 2)
        for number in itertools.count():
            tokens, session = 0, str(number)
            requests: list[RequestRow] = []
            for _ in range(draw.turns(self.turns)):
                prompt = tokens + draw.length(self.input_tokens * to_median, _SPREAD)
                answer = draw.length(self.output_tokens * to_median, _SPREAD)
                blocks = prompts.of(session, prompt, answer)
                requests.append((0, blocks, prompt, answer, session))
                tokens = prompt + answer
            yield requests
