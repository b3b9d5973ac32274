"""Traces in CSV files with times and lengths, without contents.

A prompt consists of unique block ids. In a file with sessions, a prompt at least as long as its
session so far (the last prompt and its answer) starts with the session's whole blocks. A shorter
prompt starts a new conversation.
Invariant: columns are found by their names in the first line, in any order, and further columns are
ignored. Ids repeat after 2**32 blocks. Cost: a line and the last 65 536 sessions in memory.
"""

from __future__ import annotations

import csv
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown, whole
from kvtrie.sim.readers.lines import (
    MOST,
    MOST_BLOCKS,
    Ascending,
    check_blocks,
    checked,
    lines_of,
)
from kvtrie.sim.readers.times import moment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import RequestRow

__all__ = ["Prompts", "azure_requests", "burstgpt_requests"]

_NS = 1_000_000_000
_LATEST = 2**63 - 1
_SESSIONS = 2**16


class Prompts:
    """Block ids of prompts with unknown tokens. Prompts of a session share a prefix.

    Args:
        block_tokens: tokens per block.
        most: maximum blocks per prompt.
    """

    def __init__(self, block_tokens: int, most: int = MOST_BLOCKS) -> None:
        self._block = block_tokens
        self._most = most
        self._next = 0
        self._sessions: OrderedDict[str, tuple[NDArray[np.uint32], int]] = OrderedDict()

    def of(self, session: str | None, prompt: int, answer: int) -> NDArray[np.uint32]:
        """Return the blocks of a prompt, uint32 `(n,)`. Its answer becomes part of its session.

        Args:
            session: conversation name, or None for a single request.
            prompt: number of prompt tokens.
            answer: number of answer tokens.

        Raises:
            ConfigError: the prompt has more than `most` blocks.
        """
        check_blocks(-(-(prompt + (answer if session else 0)) // self._block), self._most)
        whole_blocks, rest = divmod(prompt, self._block)
        text, tokens = self._sessions.pop(session, (self._fresh(0), 0)) if session else (None, 0)
        if text is None or prompt < tokens:
            text = self._fresh(0)
        text = np.concatenate([text, self._fresh(whole_blocks - len(text))])
        if session:
            tokens = prompt + answer
            blocks = np.concatenate([text, self._fresh(tokens // self._block - len(text))])
            self._sessions[session] = blocks, tokens
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return np.concatenate([text, self._fresh(1)]) if rest else text

    def _fresh(self, number: int) -> NDArray[np.uint32]:
        ids = np.arange(self._next, self._next + number, dtype=np.uint64)
        self._next += number
        return ids.astype(np.uint32)


def azure_requests(
    path: Path, block_tokens: int, skipped: Skipped | None = None, most: int = MOST_BLOCKS
) -> Iterator[RequestRow]:
    """Yield requests of Azure's LLM traces: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.

    Times are dates. The first valid line is at 0.

    Args:
        path: the file.
        block_tokens: tokens per block.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        most: maximum blocks of a prompt, or of a session's text.

    Raises:
        ConfigError: an invalid line, or a file without a valid line.
    """
    first: list[int] = []

    def at(cell: str) -> int:
        at_ns = moment("TIMESTAMP", cell)
        if not first:
            first.append(at_ns)
        return at_ns - first[0]

    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens", None)
    return _requests(path, columns, at, Prompts(block_tokens, most), skipped)


def burstgpt_requests(
    path: Path, block_tokens: int, skipped: Skipped | None = None, most: int = MOST_BLOCKS
) -> Iterator[RequestRow]:
    """Yield requests of BurstGPT: `Timestamp`, `Request tokens`, `Response tokens`, `Session ID`.

    Times are seconds. `Session ID` is optional. A failed request has an answer of 0 tokens.

    Args:
        path: the file.
        block_tokens: tokens per block.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        most: maximum blocks of a prompt, or of a session's text.

    Raises:
        ConfigError: an invalid line, or a file without a valid line.
    """

    def at(cell: str) -> int:
        try:
            seconds = float(cell)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds * _NS <= _LATEST:
            raise ConfigError(f"Timestamp is {shown(cell)}, seconds wanted")
        return round(seconds * _NS)

    columns = ("Timestamp", "Request tokens", "Response tokens", "Session ID")
    return _requests(path, columns, at, Prompts(block_tokens, most), skipped)


def _requests(
    path: Path,
    columns: tuple[str, str, str, str | None],
    at: Callable[[str], int],
    prompts: Prompts,
    skipped: Skipped | None,
) -> Iterator[RequestRow]:
    lines = lines_of(path)
    time, prompted, answered, named = columns
    head = next(lines, None)
    if head is None:
        raise ConfigError(f"the trace {path} holds no request")
    try:
        names = [name.strip().lstrip("\ufeff") for name in _cells(head[1])]
    except ConfigError as error:
        raise ConfigError(f"{path}, line {head[0]}: {error}") from None
    places = {name: at for at, name in enumerate(names)}
    for name in (time, prompted, answered):
        if name not in places:
            raise ConfigError(
                f"{path}, line {head[0]}: there is no column {name} among {', '.join(names)}"
            )
    clock = Ascending(time, "s", _NS)

    def parse(line: str) -> RequestRow:
        cells = _cells(line)
        if len(cells) != len(names):
            raise ConfigError(f"{len(cells)} cells, {len(names)} wanted")

        def cell(name: str) -> str:
            return cells[places[name]].strip()

        prompt = _count(prompted, cell(prompted), 1)
        answer = _count(answered, cell(answered), 0)
        session = cell(named) or None if named in places else None
        arrival = at(cell(time))
        blocks = prompts.of(session, prompt, answer)
        return clock.take(arrival), blocks, prompt, answer, session

    return checked(path, lines, parse, skipped)


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]))  # a line has at least a cell
    except csv.Error as error:
        raise ConfigError(f"no line of CSV: {error}") from error


def _count(name: str, cell: str, low: int) -> int:
    try:
        number = float(cell)
    except ValueError:
        raise ConfigError(f"{name} is {shown(cell)}, a number wanted") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {shown(cell)}, a number wanted")
    return whole(name, number, low, MOST)
