"""ShareGptLike: conversations with the lengths that ShareGPT has, without its texts.

A conversation has a geometric number of turns; what is said is log-normal, with the means given. A
prompt is all that was said before and the next question.
Invariant: the same seed gives the same trace everywhere. Cost: the conversations that are open at a
time are held.
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
        requests: how many turns in all; the last conversations are cut off.
        turns: turns of a conversation in the mean.
        input_tokens: tokens of a question in the mean.
        output_tokens: tokens of an answer in the mean.
        think_s: seconds between two turns in the mean, exponential.
        arrivals: when conversations begin, or how many clients have them.
    """

    requests: int = 1000
    turns: float = 5.56
    input_tokens: float = 37.8
    output_tokens: float = 204.6
    think_s: float = 10.0
    arrivals: Arrivals = field(default_factory=Arrivals)

    def __post_init__(self) -> None:
        """Check all."""
        put(
            self,
            requests=whole("requests", self.requests, 1, 2**53),
            turns=real("turns", self.turns, 1.001, 1e6),
            input_tokens=real("input_tokens", self.input_tokens, 1, _MOST_TOKENS),
            output_tokens=real("output_tokens", self.output_tokens, 1, _MOST_TOKENS),
            think_s=real("think_s", self.think_s, 0, 1e9),
        )

    def made(self, block_tokens: int, seed: int) -> Iterator[RequestRow]:
        """Yield the requests, as ids of blocks."""
        turns = in_turns(
            self._conversations(Prompts(block_tokens), seed),
            self.arrivals.opened(seed),
            self.think_s,
            seed + 1,  # else the same draws as for arrivals
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
