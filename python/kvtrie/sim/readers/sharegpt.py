"""ShareGPT: conversations as JSON, converted to requests of several turns.

A file is an array or a sequence of conversations: `{"id", "conversations": [{"from", "value"},
...]}`. A `human` or `user` turn ends a prompt, including all earlier turns. The next `gpt`,
`chatgpt`, `bing`, `bard` or `assistant` turn is its answer. All remaining turns, for example
`system`, are text of the conversation. The file has no times: conversations start at the given
arrivals, and a turn arrives a think time after the previous turn.
Invariant: equal texts have equal tokens. Cost: the active conversations, and the text of a
conversation.
"""

from __future__ import annotations

import heapq
import json
import re
import zlib
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown, text
from kvtrie.sim.arrivals import think_times
from kvtrie.sim.readers.compressed import open_trace
from kvtrie.sim.readers.lines import MOST_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import RequestRow

__all__ = ["Tokenize", "in_turns", "sharegpt_requests", "tokenizer_of", "words"]

Tokenize: TypeAlias = "Callable[[str], Sequence[int]]"
"""Token ids of a text."""

_CHUNK = 1 << 20
_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant")
_USERS = ("human", "user")
_BETWEEN = re.compile(r"[\s,\[\]]*")
_PIECES = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s+")


def words(text: str) -> list[int]:
    """Return tokens without a vocabulary: word pieces of up to six letters, by their CRC-32.

    For English prose the number is close to a byte-pair vocabulary's. For code and non-Latin
    scripts it may differ by a third.
    """
    return [zlib.crc32(piece.encode()) for piece in _PIECES.findall(text)]


def tokenizer_of(name: str) -> Tokenize:
    """Return `words`, or the tokenizer of a `tokenizer.json` with the package tokenizers.

    Raises:
        ConfigError: an unreadable file, or a missing package.
    """
    if name == "words":
        return words
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"trace.tokenizer is {shown(name)}: reading it needs: pip install tokenizers"
        ) from error
    try:
        made: Any = Tokenizer.from_file(name)
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"trace.tokenizer is {shown(name)}: {error}") from error
    return lambda text: made.encode(text, add_special_tokens=False).ids


def sharegpt_requests(
    path: Path,
    arrivals: Iterator[int] | None,
    *,
    tokenize: Tokenize = words,
    think_s: float = 10.0,
    seed: int = 0,
    skipped: Skipped | None = None,
) -> Iterator[RequestRow]:
    """Yield the requests of a file of conversations, in time order.

    Args:
        path: the file.
        arrivals: start times of conversations in ns, or None as for `in_turns`.
        tokenize: tokenizer with ids below 2**32.
        think_s: mean of the exponential think times between two turns, in seconds.
        seed: seed of the think times.
        skipped: counts and skips invalid conversations. None stops at the first. A conversation
            without a prompt is valid and makes no request.

    Raises:
        ConfigError: not JSON, an invalid conversation, or no conversation with a request.
    """
    return in_turns(_conversations(path, tokenize, skipped), arrivals, think_s, seed)


def in_turns(
    conversations: Iterator[list[RequestRow]],
    arrivals: Iterator[int] | None,
    think_s: float,
    seed: int,
) -> Iterator[RequestRow]:
    """Yield requests of conversations in time order.

    Args:
        conversations: turns in order, with ignored times.
        arrivals: ascending start times of conversations in ns. None means clients in a closed loop:
            sequential conversations, each turn with the think time before it. Conversations without
            a session are named by their position.
        think_s: mean of the exponential think times between two turns, in seconds.
        seed: seed of the think times.
    """
    think = think_times(think_s, seed)
    if arrivals is None:
        for number, turns in enumerate(conversations):
            for _, *request, session in turns:
                named = str(number) if session is None else session
                yield next(think), *cast("Any", request), named
        return
    opened: list[tuple[int, int, int, list[RequestRow]]] = []  # time, conversation, turn, turns
    for number, turns in enumerate(conversations):
        begun = next(arrivals)
        while opened and opened[0][0] <= begun:
            yield _next_turn(opened, think)
        heapq.heappush(opened, (begun, number, 0, turns))
    while opened:
        yield _next_turn(opened, think)


def _next_turn(
    opened: list[tuple[int, int, int, list[RequestRow]]], think: Iterator[int]
) -> RequestRow:
    at, number, turn, turns = heapq.heappop(opened)
    if turn + 1 < len(turns):
        heapq.heappush(opened, (at + next(think), number, turn + 1, turns))
    _, *request = turns[turn]
    return at, *cast("Any", request)


def _conversations(
    path: Path, tokenize: Tokenize, skipped: Skipped | None
) -> Iterator[list[RequestRow]]:
    """Yield the turns of each non-empty conversation."""
    found = False
    for line, value in _values(path):
        try:
            turns = _turns(value, tokenize)
        except ConfigError as error:
            refused = ConfigError(f"{path}, line {line}: {error}")
            if skipped is None:
                raise refused from None
            skipped.add(refused)
            continue
        if skipped is not None:
            skipped.parsed += 1
        if turns:
            found = True
            yield turns
    if not found:
        raise ConfigError(f"the trace {path} holds no request")


def _turns(value: object, tokenize: Tokenize) -> list[RequestRow]:
    if not isinstance(value, dict):
        raise ConfigError(f"a conversation is {shown(value)}, a JSON object wanted")
    row = cast("dict[str, Any]", value)
    parts = row.get("conversations")
    if not isinstance(parts, list):
        raise ConfigError(f"conversations is {shown(parts)}, a list wanted")
    session = row.get("id")
    session = None if session is None else text("id", session)
    tokens: list[int] = []
    turns: list[RequestRow] = []
    in_question = False
    for at, one in enumerate(cast("list[Any]", parts)):
        turn = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        value = turn.get("value")
        if not isinstance(value, str):
            raise ConfigError(f"conversations[{at}].value is {shown(value)}, a text wanted")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"conversations[{at}].value: {error.reason}") from error
        speaker, piece = turn.get("from"), tokenize(value)
        if speaker in _ANSWERS and in_question and tokens:
            prompt = np.array(tokens, dtype=np.uint32)
            turns.append((0, prompt, len(tokens), len(piece), session))
        in_question = speaker in _USERS
        tokens.extend(piece)
    return turns


def _values(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the values of an array or of a sequence, with their first line numbers."""
    decoder = json.JSONDecoder()
    line, buffer, at, ended, wanted = 1, "", 0, False, 0
    with open_trace(path) as file:
        while True:
            begin = cast("re.Match[str]", _BETWEEN.match(buffer, at)).end()
            line += buffer.count("\n", at, begin)
            at = begin
            if at < len(buffer) and (ended or len(buffer) - at >= wanted):
                try:
                    value, end = decoder.raw_decode(buffer, at)
                except (ValueError, RecursionError) as error:
                    if ended or isinstance(error, RecursionError):
                        raise ConfigError(f"{path}, line {line}: no JSON: {error}") from error
                    if len(buffer) - at > MOST_CHARACTERS:
                        raise ConfigError(
                            f"{path}, line {line}: no end of the JSON value within "
                            f"{MOST_CHARACTERS} characters, the most that are read as one"
                        ) from error
                    # Incomplete: read twice the length, so a long value is not decoded often.
                    wanted = 2 * (len(buffer) - at)
                else:
                    yield line, value
                    line += buffer.count("\n", at, end)
                    at, wanted = end, 0
                    continue
            if ended:
                return
            chunk = file.read(max(_CHUNK, wanted))
            buffer, at, ended = buffer[at:] + chunk, 0, not chunk
