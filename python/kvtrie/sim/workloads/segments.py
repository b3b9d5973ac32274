"""Segments: single prompts sharing segments with earlier prompts, at the front and inside.

A prompt has `prompt_tokens` in segments of equal length. A share `reuse_ratio` is copied from an
earlier prompt. Of these segments, the share `prefix_ratio` is copied from front to front, where a
prefix cache finds them. The remaining copied segments are shuffled between new segments, out of its
reach.
Invariant: the same seed gives the same trace everywhere. Cost: a draw per segment, with the last
`window` prompts in memory.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import put, real, whole, word
from kvtrie.sim.arrivals import Arrivals, think_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.sim.readers.rows import RequestRow

__all__ = ["Segments"]

_MOST = 2**31 - 1
_SELECTIONS = ("uniform", "recent", "popular")


@dataclass(frozen=True, slots=True)
class Segments:
    """A trace of prompts made of segments.

    Attributes:
        requests: number of requests.
        prompt_tokens: tokens of each prompt, rounded up to whole segments.
        output_tokens: tokens of each answer.
        segment_length: tokens of a segment, a multiple of the block size.
        reuse_ratio: share of a prompt's segments copied from an earlier prompt.
        prefix_ratio: share of the copied segments at the front of both prompts.
        request_selection: choice of the earlier prompt: "uniform" (any in the window), "recent"
            (half as often per step back) or "popular" (the n-th oldest about 1/n as often as the
            first, Zipf).
        window: number of earlier prompts to choose from.
        arrivals: arrival times, or number of clients.
        think_s: mean of the exponential think times after an answer in seconds, for clients in a
            closed loop.
    """

    requests: int = 1000
    prompt_tokens: int = 4096
    output_tokens: int = 128
    segment_length: int = 512
    reuse_ratio: float = 0.5
    prefix_ratio: float = 0.5
    request_selection: str = "uniform"
    window: int = 1000
    arrivals: Arrivals = field(default_factory=Arrivals)
    think_s: float = 10.0

    def __post_init__(self) -> None:
        """Check the settings."""
        put(
            self,
            requests=whole("requests", self.requests, 1, 2**53),
            prompt_tokens=whole("prompt_tokens", self.prompt_tokens, 1, _MOST),
            output_tokens=whole("output_tokens", self.output_tokens, 0, _MOST),
            segment_length=whole("segment_length", self.segment_length, 1, _MOST),
            reuse_ratio=real("reuse_ratio", self.reuse_ratio, 0, 1),
            prefix_ratio=real("prefix_ratio", self.prefix_ratio, 0, 1),
            request_selection=word("request_selection", self.request_selection, _SELECTIONS),
            window=whole("window", self.window, 1, 2**24),
            think_s=real("think_s", self.think_s, 0, 1e9),
        )

    def made(self, block_tokens: int, seed: int) -> Iterator[RequestRow]:
        """Yield the requests as block ids.

        Raises:
            ConfigError: a segment length not divisible by the block size.
        """
        if self.segment_length % block_tokens:
            raise ConfigError(
                f"segment_length is {self.segment_length}, a multiple of the {block_tokens} tokens "
                "of a block wanted"
            )
        rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
        number = -(-self.prompt_tokens // self.segment_length)
        parts = np.arange(self.segment_length // block_tokens, dtype=np.uint64)
        history: deque[list[int]] = deque(maxlen=self.window)
        following = 0
        times = self.arrivals.opened(seed) or think_times(self.think_s, seed)
        for _, at in zip(range(self.requests), times, strict=False):
            reused = round(number * self.reuse_ratio) if history else 0
            front = round(reused * self.prefix_ratio)
            prompt: list[int] = []
            inside: list[int] = []
            if reused:
                earlier = self._chosen(history, rng)
                prompt = earlier[:front]
                inside = rng.sample(earlier[front:], reused - front)
            fresh = list(range(following, following + number - reused))
            following += len(fresh)
            # If possible, a new segment ends the common front.
            prompt += fresh[:1]
            others = inside + fresh[1:]
            rng.shuffle(others)
            prompt += others
            history.append(prompt)
            ids = (np.array(prompt, dtype=np.uint64)[:, None] * len(parts) + parts).reshape(-1)
            yield at, ids.astype(np.uint32), number * self.segment_length, self.output_tokens, None

    def _chosen(self, history: deque[list[int]], rng: random.Random) -> list[int]:
        if self.request_selection == "recent":
            return history[-1 - min(len(history) - 1, int(-math.log2(1 - rng.random())))]
        if self.request_selection == "popular":
            return history[int((len(history) + 1) ** rng.random()) - 1]
        return history[rng.randrange(len(history))]
