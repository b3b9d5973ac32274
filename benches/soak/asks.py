"""Asks: requests without end, of ever new tenants, sessions and images.

Invariant: equal seeds give equal requests; nothing is asked for that an earlier round asked for.
Cost: a trace of `ROUND` requests in memory.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtrie import Scope
from kvtrie.sim.workloads import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ROUND", "SIZE", "Ask", "asks"]

SIZE = 16
SCALE = 512 // SIZE  # tokens of the trace per token of ours
ROUND = 2000
TOKENS = 2**31  # numbers from here on may be digests


class Ask(NamedTuple):
    """A request.

    Attributes:
        tokens: prompt and answer, uint32.
        prompt: how many of them are the prompt.
        scope: whose they are, and which image stands in them.
        session: the conversation it belongs to.
        given_up: whether it ends before anything is committed.
        over: whether its session is released when it has ended.
    """

    tokens: np.ndarray
    prompt: int
    scope: Scope
    session: str
    given_up: bool
    over: bool


def asks(seed: int, most: int) -> Iterator[Ask]:
    """Requests without end: all families of workloads in turn, each time with another seed.

    A quarter of them is a tenant's only one, a quarter shows an image that is not seen again, half
    have a separate session, an eighth is given up and half of the sessions are released; the
    others share tenant, image and session with those that begin alike.

    Args:
        seed: of the first.
        most: tokens of prompt and answer; longer ones are cut.
    """
    names, first = list(FAMILIES), 0
    for turn in count():
        trace = FAMILIES[names[turn % len(names)]](requests=ROUND, seed=seed + turn)
        draw = np.random.default_rng((seed, turn))
        for number, request in enumerate(trace):
            answer = min(1 + request.output_tokens // SCALE, most // 2)
            prompt = min(-(-request.input_tokens // SCALE), most - answer)
            blocks = (first + request.blocks.astype(np.int64)) % TOKENS
            tokens = np.repeat(blocks, SIZE)[:prompt]
            fresh = np.full(answer, tokens[-1])
            own, shared = f"{turn}/{number}", f"{turn}:{request.blocks[0]}"
            chances = draw.random(4)
            at, image = int(draw.integers(prompt)), own
            if chances[1] >= 0.25:
                at, image = 0, shared
            yield Ask(
                tokens=np.concatenate([tokens, fresh]).astype(np.uint32),
                prompt=prompt,
                scope=Scope(
                    tenant=(own if chances[0] < 0.25 else shared).encode(),
                    extra=((at, image.encode()),) if chances[1] < 0.5 else (),
                ),
                session=own if chances[2] < 0.5 else shared,
                given_up=bool(chances[3] < 0.125),
                over=bool(chances[3] >= 0.5),
            )
        first += 1 + max(int(request.blocks.max()) for request in trace)
