"""Found: contents and changes of a store, for `kvtrie disk`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Cleaned", "Finding", "Look", "Row", "Verified"]

Row: TypeAlias = tuple[int, bytes, int, int, int, int, bool]
"""A block: slot, key, first layer, last layer plus 1, nanoseconds since its last use, uses, and
whether all blocks before it are there."""


@dataclass(frozen=True, slots=True)
class Look:
    """The contents of a store.

    Attributes:
        store: its own folder, or the file of a kept host tier.
        about: the meaning of its KV, as JSON.
        slots: maximum number of blocks.
        bytes: the size of its files on the disk.
        read_only: the reason against a new writer now, or None.
        rows: its blocks.
    """

    store: Path
    about: str
    slots: int
    bytes: int
    read_only: str | None
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that failed verification.

    Attributes:
        slot: the block's slot. None for a part of the manifest without a block.
        key: the block's name, or None as for the slot.
        reason: the fault.
        removed: whether it is removed now.
    """

    slot: int | None
    key: bytes | None
    reason: str
    removed: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """A store after a read of all its bytes.

    Attributes:
        store: its own folder.
        blocks: number of blocks read.
        read_only: the reason against removals, or None.
        findings: the records that failed verification.
    """

    store: Path
    blocks: int
    read_only: str | None
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A store after a cleaning.

    Attributes:
        store: its own folder.
        freed: bytes by which its files shrank.
        removed: whether the whole store is removed.
        read_only: why it was left alone, or None.
    """

    store: Path
    freed: int
    removed: bool
    read_only: str | None
