"""Step times of a served engine, measured from outside.

An idle server is asked for first tokens and for answers of several requests at once. A prompt that
begins like an earlier one has its context in the engine's own cache, so a prefill after any context
can be timed. Times are those of a client: what a request takes outside of the engine's steps is
measured apart, by a prompt of one token, and taken off.
Invariant: prompts of one call share nothing but what the call means to share. Cost: the prefills
and decodes that it times, `repeats` times.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.sim.completions import Answer, Server

__all__ = ["profile_server"]

_DECODED = 24
_LEAST = 64


def profile_server(
    server: Server,
    *,
    longest: int,
    requests: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 5,
    vocabulary: int = 8192,
    on_step: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return `passes`, `decode` and `server` as a file of `kvtrie profile` has them.

    Args:
        server: nothing else may ask it meanwhile.
        longest: tokens of the longest prompt.
        requests: how many decode together, ascending from 1.
        repeats: measurements of each number, of which the median counts.
        vocabulary: prompts have token ids from 0 below it.
        on_step: told what is measured next.

    Raises:
        ConfigError: the server refuses a request, or does not cache prefixes.
        TransferError: the server cannot be reached.
    """
    if longest < _LEAST:
        raise ConfigError(f"longest is {longest} tokens, at least {_LEAST} wanted")
    draw = np.random.default_rng(secrets.randbits(64))

    def words(count: int) -> list[int]:
        return draw.integers(0, vocabulary, count).tolist()

    def first(prompt: Sequence[int]) -> int:
        return server.answer(prompt, 1).first_ns

    on_step("First requests")
    for _ in range(2):
        server.answer(words(longest // 2), 4)
    contexts, counts = [0, longest // 2], _counts(longest // 2)
    on_step("Prompts of one token")
    single = median(first(words(1)) for _ in range(4 * repeats))
    decode_ns = [
        [
            _step_ns(server, [words(max(1, context)) for _ in range(many)], repeats, on_step)
            for many in requests
        ]
        for context in contexts
    ]
    base = decode_ns[0][0]
    request_ns = max(0, single - base)
    rows = [[base], []]
    for row, context in zip(rows, contexts, strict=True):
        for count in counts[len(row) :]:
            on_step(f"Prefills of {count} tokens after {context}")
            times = []
            for _ in range(repeats):
                begin = words(context)
                if begin:
                    _remember(server, begin, words(1))
                times.append(first(begin + words(count)))
            row.append(max(base, median(times) - request_ns))
    return {
        "passes": {"contexts": contexts, "tokens": counts, "ns": _whole(rows)},
        "decode": {"contexts": contexts, "requests": list(requests), "ns": _whole(decode_ns)},
        "server": {"request_ns": round(request_ns)},
    }


def _counts(most: int) -> list[int]:
    counts = [1]
    while 4 * counts[-1] < most:
        counts.append(4 * counts[-1])
    return [*counts, most]


def _whole(rows: list[list[float]]) -> list[list[int]]:
    return [[round(ns) for ns in row] for row in rows]


def _remember(server: Server, prompt: list[int], more: list[int]) -> None:
    """Have a prompt in the engine's cache, to its last full block."""
    server.answer(prompt + more, 1)


def _step_ns(
    server: Server, prompts: list[list[int]], repeats: int, on_step: Callable[[str], object]
) -> float:
    """Nanoseconds of a step in which a token of each prompt's answer is made."""
    on_step(f"Decodes of {len(prompts)} requests after {len(prompts[0])} tokens")
    steps: list[float] = []
    with ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(repeats):
            answers: list[Answer] = list(
                threads.map(lambda prompt: server.answer(prompt, _DECODED), prompts)
            )
            begin = max(answer.parts[0] for answer in answers)
            end = min(answer.parts[-1] for answer in answers)
            for answer in answers:
                together = [at for at in answer.parts if begin <= at <= end]
                # Parts may come in bursts: their mean distance is that of the steps.
                if len(together) > 1:
                    steps.append((together[-1] - together[0]) / (len(together) - 1))
    if not steps:
        raise ConfigError(
            f"{len(prompts)} answers of {_DECODED} tokens were never made together: "
            "ask for fewer requests"
        )
    return median(steps)
