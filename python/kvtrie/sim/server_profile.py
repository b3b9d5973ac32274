"""Step times of a served engine, measured by a client.

Measures first tokens and concurrent answers of an idle server. A prompt with a repeated prefix has
its context in the engine's cache, so prefills after any context can be timed. The client's time
outside of engine steps is measured separately, with a prompt of a single token, and subtracted.
Invariant: prompts share no tokens except the intended context. Cost: the measured prefills and
decodes, `repeats` times.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.sim.completions import Server

__all__ = ["profile_server"]

_DECODED, _SINGLES, _LEAST = 24, 3, 64


def profile_server(
    server: Server,
    *,
    longest: int,
    requests: Sequence[int] = (1, 4, 16, 32),
    repeats: int = 5,
    vocabulary: int = 8192,
    on_step: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return `passes`, `decode` and `server` in the format of `kvtrie profile`.

    Args:
        server: an otherwise idle server.
        longest: tokens of the longest prompt.
        requests: numbers of concurrent decodes, ascending from 1.
        repeats: rounds over all cells. The median of a cell counts.
        vocabulary: number of token ids used in prompts, from 0 on.
        on_step: called with a description of the next measurement.

    Raises:
        ConfigError: the server refuses a request, or does not cache prefixes.
        TransferError: the server is unreachable.
    """
    if longest < _LEAST:
        raise ConfigError(f"longest is {longest} tokens, at least {_LEAST} wanted")
    cells = _Cells(server, vocabulary)
    contexts, counts = [0, longest // 2], _counts(longest // 2)
    on_step("First requests")
    server.answer(cells.words(longest // 2), 4)
    for number in range(repeats):
        # A disturbed round affects a single value of each cell, not all values of a cell.
        for _ in range(_SINGLES):
            cells.first_token(0, 1)
        for context in contexts:
            for many in requests:
                on_step(f"Round {number + 1}: answers of {many} requests after {context} tokens")
                cells.step(context, many)
            for count in counts:
                on_step(f"Round {number + 1}: {count} tokens after {context}")
                cells.first_token(context, count)
    base = cells.median("step", 0, 1)
    request_ns = max(0.0, cells.median("first", 0, 1) - base)
    passes = [
        [max(base, cells.median("first", context, count) - request_ns) for count in counts]
        for context in contexts
    ]
    decode = [[cells.median("step", context, many) for many in requests] for context in contexts]
    return {
        "passes": {"contexts": contexts, "tokens": counts, "ns": _whole(passes)},
        "decode": {"contexts": contexts, "requests": list(requests), "ns": _whole(decode)},
        "server": {"request_ns": round(request_ns)},
    }


class _Cells:
    """Measured times of a server, by kind, context and number of tokens or requests."""

    def __init__(self, server: Server, vocabulary: int) -> None:
        self._server = server
        self._vocabulary = vocabulary
        self._draw = np.random.default_rng(secrets.randbits(64))
        self._times: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)

    def words(self, count: int) -> list[int]:
        """Draw a new random prompt."""
        return self._draw.integers(0, self._vocabulary, count).tolist()

    def median(self, kind: str, context: int, number: int) -> float:
        """Return the median of a cell in ns."""
        times = self._times[kind, context, number]
        if not times:
            raise ConfigError(
                f"{number} answers of {_DECODED} tokens were never made together: ask for fewer "
                "requests"
            )
        return median(times)

    def _cached(self, context: int) -> list[int]:
        """Put a new prompt into the engine's prefix cache and return it."""
        prompt = self.words(context)
        if prompt:
            self._server.answer([*prompt, *self.words(1)], 1)
        return prompt

    def first_token(self, context: int, count: int) -> None:
        """Measure the first token of a prompt with `count` new tokens."""
        prompt = self._cached(context) + self.words(count)
        self._times["first", context, count].append(self._server.answer(prompt, 1).first_ns)

    def step(self, context: int, many: int) -> None:
        """Measure several concurrent answers to one prompt, with tokens made in the same steps."""
        # A prompt of each request would take a prefill of each.
        cached = self._cached(context)
        prompts = [cached + self.words(1) for _ in range(many)]
        with ThreadPoolExecutor(many) as threads:
            answers = list(threads.map(self._server.answer, prompts, [_DECODED] * many))
        begin = max(answer.parts[0] for answer in answers)
        end = min(answer.parts[-1] for answer in answers)
        for answer in answers:
            together = [at for at in answer.parts if begin <= at <= end]
            # Parts may come in bursts, but their mean distance equals the step time.
            if len(together) > 1:
                step = (together[-1] - together[0]) / (len(together) - 1)
                self._times["step", context, many].append(step)


def _counts(most: int) -> list[int]:
    """Return token counts up to `most`: by factors of 4, and of 2 from 64 on."""
    counts = [1]
    while (after := counts[-1] * (4 if counts[-1] < _LEAST else 2)) < most:
        counts.append(after)
    return [*counts, most]


def _whole(rows: list[list[float]]) -> list[list[int]]:
    return [[round(ns) for ns in row] for row in rows]
