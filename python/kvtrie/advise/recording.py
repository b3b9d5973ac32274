"""Recordings: a server's KV events in a file, a JSON object per line.

The first line names the format. A line has a batch of events, or the counters of `/metrics`.
Token ids are left out, and names of blocks and sessions are digests under a key that is never
stored: equal blocks of a recording stay equal, and no prompt can be guessed from them.
Invariant: only the owner can read the file, from its first byte on, and reading it gives the same
requests. Cost: about 20 bytes per block.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from contextlib import suppress
from hashlib import blake2b
from typing import IO, TYPE_CHECKING, Any, cast

from kvtrie.advise.wire import (
    MOST_GROUP,
    MOST_NUMBER,
    MOST_S,
    MOST_SIZE,
    MOST_WINDOW,
    Batch,
    Part,
    Stored,
)
from kvtrie.errors import ConfigError
from kvtrie.input import json_of
from kvtrie.settings.argument import flag, instance, real, shown, text, whole
from kvtrie.sim.readers.lines import ids_of, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtrie.advise.wire import Hash

__all__ = ["Recorder", "is_recording", "read_recording"]

_FORMAT = "kvtrie events"
_VERSION = 1
_DIGEST = 8
_OWNER_ONLY = 0o600


class Recorder:
    """Writer of a recording.

    Args:
        path: a new file.
        keep_tokens: write token ids and the engine's names.

    Raises:
        ConfigError: the file exists already, or is unwritable.
    """

    def __init__(self, path: Path, *, keep_tokens: bool = False) -> None:
        self._key = None if keep_tokens else secrets.token_bytes(32)
        self._path = path
        try:
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        except OSError as error:
            raise ConfigError(
                f"cannot write the recording {path}: {error.strerror}; a new file wanted"
            ) from error
        self._file: IO[str] = os.fdopen(made, "w", encoding="utf-8")
        try:
            self._write({"recording": _FORMAT, "version": _VERSION, "tokens": keep_tokens})
        except ConfigError:
            with suppress(OSError):  # closing writes the buffer again
                self._file.close()
            path.unlink()
            raise

    def batch(self, batch: Batch) -> None:
        """Write the events of a step."""
        stored: list[dict[str, Any]] = []
        for one in batch.stored:
            row: dict[str, Any] = {"blocks": self._names(one.hashes), "size": one.size}
            if one.parent is not None:
                row["parent"] = self._name(one.parent)
            if one.session is not None:
                row["session"] = self._session(one.session)
            if self._key is None:
                row["tokens"] = list(one.tokens)
            stored.append(row)
        line: dict[str, Any] = {"number": batch.number, "at": batch.at}
        if batch.rank is not None:
            line["rank"] = batch.rank
        more = {
            "stored": stored,
            "removed": self._names(batch.removed),
            "cleared": batch.cleared,
            "parts": [self._part(one) for one in batch.parts],
        }
        self._write(line | {name: value for name, value in more.items() if value})

    def metrics(self, counters: dict[str, float]) -> None:
        """Write the counters of a server."""
        self._write({"metrics": counters})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _part(self, part: Part) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": part.kind, "window": part.window, "size": part.size}
        row |= {"blocks": self._names(part.stored), "removed": self._names(part.removed)}
        return {"group": part.group} | {name: value for name, value in row.items() if value}

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error

    def _names(self, names: Sequence[Hash]) -> list[int | str]:
        return [self._name(name) for name in names]

    def _name(self, name: Hash) -> int | str:
        if self._key is None:
            return name.hex() if isinstance(name, bytes) else name
        plain = name if isinstance(name, bytes) else b"%d" % name
        return int.from_bytes(blake2b(plain, digest_size=_DIGEST, key=self._key).digest(), "big")

    def _session(self, name: str) -> str:
        if self._key is None:
            return name
        return blake2b(name.encode(), digest_size=_DIGEST, key=self._key).hexdigest()


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording, not a trace.

    Raises:
        ConfigError: the file is unreadable.
    """
    for _, line in lines_of(path):
        return f'"{_FORMAT}"' in line
    return False


def read_recording(path: Path) -> Iterator[Batch | dict[str, float]]:
    """Yield the batches of a recording, and counters as dictionaries, in order.

    Raises:
        ConfigError: an unreadable file, a wrong version, or a cut or damaged line.
    """
    for number, line in lines_of(path):
        try:
            row = json_of(line, "no JSON")
        except ConfigError as error:
            raise ConfigError(
                f"{path}, line {number}: no JSON object: the file is cut or damaged there; remove "
                "the line to use the lines before it"
            ) from error
        try:
            row = _row("a line", row)
            if "recording" in row:
                if row["version"] != _VERSION:
                    raise ConfigError(
                        f"a recording of version {shown(row['version'])}, {_VERSION} wanted"
                    )
                continue
            yield _counters(row["metrics"]) if "metrics" in row else _batch(row)
        except (KeyError, TypeError, ValueError) as error:
            said = error if isinstance(error, ConfigError) else f"{type(error).__name__} {error}"
            raise ConfigError(
                f"{path}, line {number}: not a line of a recording: {said}"
            ) from error


def _counters(given: object) -> dict[str, float]:
    rows = _row("metrics", given).items()
    return {name: real(name, value, 0, math.inf) for name, value in rows}


def _row(name: str, given: object) -> dict[str, Any]:
    return cast("dict[str, Any]", instance(name, given, dict))


def _batch(row: dict[str, Any]) -> Batch:
    rank = row.get("rank")
    return Batch(
        whole("number", row["number"], 0, MOST_NUMBER),
        real("at", row["at"], 0, MOST_S),
        [_stored(_row("stored", one)) for one in _list(row, "stored")],
        [_hash(name) for name in _list(row, "removed")],
        flag("cleared", row.get("cleared", False)),
        None if rank is None else whole("rank", rank, 0, MOST_NUMBER),
        [_part(_row("parts", one)) for one in _list(row, "parts")],
    )


def _part(row: dict[str, Any]) -> Part:
    window = row.get("window")
    return Part(
        whole("group", row["group"], 0, MOST_GROUP),
        text("kind", row.get("kind", "")),
        None if window is None else whole("window", window, 1, MOST_WINDOW),
        whole("size", row.get("size", 0), 0, MOST_SIZE),
        [_hash(name) for name in _list(row, "blocks")],
        [_hash(name) for name in _list(row, "removed")],
    )


def _stored(row: dict[str, Any]) -> Stored:
    parent, session = row.get("parent"), row.get("session")
    blocks = cast("list[Any]", instance("blocks", row["blocks"], list))
    names = [_hash(name) for name in blocks]
    size = whole("size", row["size"], 1, MOST_SIZE)
    tokens = _list(row, "tokens")
    if tokens and len(tokens) != size * len(names):
        raise ConfigError(f"{len(names)} blocks of {size} tokens have {len(tokens)} token ids")
    return Stored(
        names,
        None if parent is None else _hash(parent),
        size,
        None if session is None else text("session", session),
        ids_of("tokens", tokens).tolist() if tokens else (),
    )


def _list(row: dict[str, Any], name: str) -> list[Any]:
    return cast("list[Any]", instance(name, row.get(name, []), list))


def _hash(name: Any) -> Hash:  # noqa: ANN401 - a value of JSON
    if isinstance(name, str):
        return bytes.fromhex(name)
    if isinstance(name, bool) or not isinstance(name, int):
        raise TypeError(f"{name!r} is no name of a block")
    return name
