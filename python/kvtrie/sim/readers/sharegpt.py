"""ShareGPT: conversations as JSON, which become requests of several turns.

A file is an array of conversations, or one after the other: `{"id", "conversations": [{"from",
"value"}, ...]}`. A `human` or `user` turn ends a prompt, which begins with all turns before; the
next `gpt`, `chatgpt`, `bing`, `bard` or `assistant` turn is its answer; anything else, as `system`,
is text of the conversation. The file has no times: conversations begin at the arrivals given, and
a turn comes a think time after the one before it.
Invariant: equal texts have equal tokens. Cost: the conversations that are open at a time are held,
and the text of one.
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
from kvtrie.sim.arrivals import thoughts
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
    """Tokens without a vocabulary: pieces of words of at most six letters, by their CRC-32.

    English prose has about as many as a byte-pair vocabulary makes of it; code and other scripts
    may have more or fewer by a third.
    """
    return [zlib.crc32(piece.encode()) for piece in _PIECES.findall(text)]


def tokenizer_of(name: str) -> Tokenize:
    """`words`, or the tokens of a `tokenizer.json` by the package tokenizers.

    Raises:
        ConfigError: the file cannot be read, or the package is missing.
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
    """Yield the requests of a file of conversations, in order of time.

    Args:
        path: the file.
        arrivals: when conversations begin, in ns; None as for `in_turns`.
        tokenize: token ids of a text, below 2**32.
        think_s: seconds between two turns of a conversation, exponential with this mean.
        seed: of the think times.
        skipped: counts conversations that cannot be, which are left out; None ends with the first.
            One without a prompt is no error and makes no request.

    Raises:
        ConfigError: the file is no JSON; a conversation that cannot be; none that makes a request.
    """
    return in_turns(_conversations(path, tokenize, skipped), arrivals, think_s, seed)


def in_turns(
    conversations: Iterator[list[RequestRow]],
    arrivals: Iterator[int] | None,
    think_s: float,
    seed: int,
) -> Iterator[RequestRow]:
    """Yield requests of conversations in order of time.

    Args:
        conversations: turns in order; their times are not read.
        arrivals: when conversations begin, in ns, ascending. None is for clients that wait for
            answers: one conversation after the other, each turn with the time to think before it.
            Conversations without a session take their place as one.
        think_s: seconds between two turns, exponential with this mean.
        seed: of the think times.
    """
    think = thoughts(think_s, seed)
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
    """The turns of each conversation that has some."""
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
    """The values of an array, or values that follow each other, with the lines they begin on."""
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
                    # Cut off: read as much again, so that a long value is not decoded often.
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
