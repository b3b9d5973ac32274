"""Wire: decodes KV events published by vLLM and SGLang, without importing either engine.

A message has the frames topic, sequence number (8 bytes, big-endian) and msgpack `[ts, events,
rank]`. Each event is a map with `type`. Only blocks in the engine's GPU memory count. In a hybrid
model the first group with full attention gives the requests. Blocks of all remaining groups are
`Part`s.
Invariant: an invalid message raises a `ConfigError` with the reason. Cost: decoding by msgspec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import real, shown, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MOST_GROUP",
    "MOST_NUMBER",
    "MOST_S",
    "MOST_SIZE",
    "MOST_WINDOW",
    "Batch",
    "Hash",
    "Part",
    "Reader",
    "Stored",
]

Hash = int | bytes
"""Name of a block and of all blocks before it."""

MOST_NUMBER = 2**64 - 1
"""The greatest sequence number and rank."""

MOST_S = 2.0**33
"""The latest time of an engine's clock, in seconds."""

MOST_SIZE = 2**20
"""The most tokens of a block."""

MOST_GROUP = 2**16 - 1
"""The greatest number of a group of layers."""

MOST_WINDOW = 2**63 - 1
"""The most tokens of a sliding window."""

_MEDIA = (None, "GPU")
_FULL = (None, "full_attention", "mla_attention", "sink_full_attention")
_FRAMES = 3
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks stored by the engine for a request.

    Attributes:
        hashes: their names, first to last.
        parent: name of the block before the first. None at a sequence's start.
        size: tokens of a block.
        session: name of the request's session, if the engine has one.
        tokens: token ids of the blocks. Empty in a recording without them.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    size: int
    session: str | None = None
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of a group of layers other than the requests' group.

    Attributes:
        group: the engine's number of the group.
        kind: the engine's name of its kind. Empty without stored blocks.
        window: tokens of a sliding window, if published.
        size: tokens of a block, 0 without stored blocks.
        stored: names of stored blocks. An engine may leave out intermediate blocks outside a
            window.
        removed: names of removed blocks.
    """

    group: int
    kind: str = ""
    window: int | None = None
    size: int = 0
    stored: Sequence[Hash] = ()
    removed: Sequence[Hash] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of a step of the engine.

    Attributes:
        number: sequence number of the message.
        at: seconds of the engine's clock.
        stored: stored blocks.
        removed: names of removed blocks.
        cleared: whether the engine dropped all blocks.
        rank: data-parallel rank of the engine, if it has one.
        parts: blocks of all remaining groups of layers, in the order of the events.
    """

    number: int
    at: float
    stored: Sequence[Stored] = ()
    removed: Sequence[Hash] = ()
    cleared: bool = False
    rank: int | None = None
    parts: Sequence[Part] = ()


class _Event(msgspec.Struct, tag_field="type"):
    """An event of either engine."""


class _BlockStored(_Event, tag="BlockStored"):
    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class _BlockRemoved(_Event, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    pass


class _Message(msgspec.Struct, array_like=True):
    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    rank: int | None = None


@dataclass(slots=True)
class Reader:
    """Decoder of a publisher's messages."""

    _group: int | None = None
    _size: int = 0
    _several: bool = False
    _topic: bytes | None = None
    _decoder: msgspec.msgpack.Decoder[_Message] = field(
        default_factory=lambda: msgspec.msgpack.Decoder(_Message)
    )

    def read(self, frames: Sequence[bytes]) -> Batch:
        """Return the events of a message.

        Args:
            frames: topic, sequence number and payload.

        Raises:
            ConfigError: a wrong number of frames, no sequence number, an invalid payload, events
                without token ids, or two topics on one endpoint.
        """
        if len(frames) != _FRAMES or len(frames[1]) != _NUMBER_BYTES:
            raise ConfigError(
                f"a message has {len(frames)} frames of {[len(frame) for frame in frames[:9]]} "
                "bytes; topic, a sequence number of 8 bytes and a payload wanted: is this the "
                "endpoint of --kv-events-config?"
            )
        topic, number, payload = frames
        if topic != (self._topic or topic):
            raise ConfigError(
                f"the endpoint has the topics {shown(self._topic)} and {shown(topic)}: several "
                "models or servers publish there; give each its own endpoint"
            )
        self._topic = topic
        try:
            message = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"message {int.from_bytes(number, 'big')} is not KV events as vLLM 0.32 or SGLang "
                f"0.5 publish them: {error}"
            ) from error
        return self._batch(int.from_bytes(number, "big"), message)

    def _batch(self, number: int, message: _Message) -> Batch:
        stored: list[Stored] = []
        removed: list[Hash] = []
        parts: list[Part] = []
        cleared = False
        for event in message.events:
            if isinstance(event, _AllBlocksCleared):
                cleared = True
            elif event.medium not in _MEDIA:
                continue
            elif not self._counts(event):
                parts.append(_part(number, event))
            elif isinstance(event, _BlockRemoved):
                removed += event.block_hashes
            elif not self._is_partial(event):
                stored.append(_checked(number, event))
        self._several |= bool(parts)
        at = real(f"time of message {number}", message.ts, 0, MOST_S)
        runs = joined(stored)
        return Batch(number, at, runs, removed, cleared, message.rank, parts)

    def _counts(self, event: _BlockStored | _BlockRemoved) -> bool:
        """Return whether an event is of the requests' group."""
        full = isinstance(event, _BlockRemoved) or event.kv_cache_spec_kind in _FULL
        if self._group is None and isinstance(event, _BlockStored) and full:
            self._group = event.group_idx
        return full and event.group_idx == self._group

    def _is_partial(self, event: _BlockStored) -> bool:
        """Return whether an event names a part of a block.

        With groups of several block sizes vLLM also publishes a prompt's partial last block, as a
        single block of the size of its hashes.
        """
        size, self._size = event.block_size, max(self._size, event.block_size)
        whole_blocks = size >= self._size or len(event.block_hashes) > 1 or size < 1
        return self._several and not whole_blocks and self._size % size == 0


def _part(number: int, event: _BlockStored | _BlockRemoved) -> Part:
    """Return the blocks of an event outside the requests' group.

    Raises:
        ConfigError: invalid numbers, or too few token ids for the blocks.
    """
    group = whole(f"group_idx of message {number}", event.group_idx or 0, 0, MOST_GROUP)
    if isinstance(event, _BlockRemoved):
        return Part(group, removed=event.block_hashes)
    blocks, tokens, size = len(event.block_hashes), len(event.token_ids), event.block_size
    if not 1 <= size <= MOST_SIZE or tokens % size or tokens < blocks * size:
        raise ConfigError(
            f"message {number} stores {blocks} blocks of {size} tokens of group {group} with "
            f"{tokens} token ids, a multiple of {size} from {blocks * size} on wanted"
        )
    window = event.kv_cache_spec_sliding_window
    if window is not None:
        window = whole(f"sliding window of message {number}", window, 1, MOST_WINDOW)
    return Part(group, event.kv_cache_spec_kind or "", window, size, event.block_hashes)


def _checked(number: int, event: _BlockStored) -> Stored:
    blocks, tokens = len(event.block_hashes), len(event.token_ids)
    if blocks and not tokens:
        raise ConfigError(
            f"message {number} stores {blocks} blocks without token ids: the engine publishes "
            "hashes only, and advise needs events with tokens"
        )
    if not 1 <= event.block_size <= MOST_SIZE or tokens != blocks * event.block_size:
        raise ConfigError(
            f"message {number} stores {blocks} blocks of {event.block_size} tokens with {tokens} "
            f"token ids, {blocks * event.block_size} wanted"
        )
    hashes, parent = event.block_hashes, event.parent_block_hash
    return Stored(hashes, parent, event.block_size, event.session_id, event.token_ids)


def joined(stored: Sequence[Stored]) -> list[Stored]:
    """Join consecutive events of a step: SGLang sends an event per page."""
    runs: list[Stored] = []
    for event in stored:
        last = runs[-1] if runs else None
        if (
            last is None
            or event.parent is None
            or event.parent != last.hashes[-1]
            or (event.session, event.size) != (last.session, last.size)
        ):
            if event.hashes:
                runs.append(event)
            continue
        hashes, tokens = [*last.hashes, *event.hashes], [*last.tokens, *event.tokens]
        runs[-1] = Stored(hashes, last.parent, last.size, last.session, tokens)
    return runs
