"""Found: the contents of a store and what is done to it, as `kvtrie disk` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Cleaned", "Finding", "Look", "Row", "Verified"]

Row: TypeAlias = tuple[int, bytes, int, int, int, int, bool]
"""A block: slot, key, first layer, one after the last, nanoseconds since its last use, uses, and
whether all blocks before it are there."""


@dataclass(frozen=True, slots=True)
class Look:
    """The contents of a store.

    Attributes:
        store: its own folder; of a kept host tier, its file.
        about: the meaning of its KV, as JSON.
        slots: how many blocks it may hold.
        bytes: the size of its files on the disk.
        read_only: the reason why no other process may write now; None if one may.
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
    """Something that could not be proved.

    Attributes:
        slot: the block's slot; None for a part of the manifest that names no block.
        key: the block's name; None as for the slot.
        reason: the fault.
        removed: whether it is gone now.
    """

    slot: int | None
    key: bytes | None
    reason: str
    removed: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """A store after every byte of it was read.

    Attributes:
        store: its own folder.
        blocks: how many blocks were read.
        read_only: why nothing could be removed; None if it could.
        findings: the records that could not be proved.
    """

    store: Path
    blocks: int
    read_only: str | None
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A store after it was cleaned.

    Attributes:
        store: its own folder.
        freed: bytes by which its files shrank.
        removed: whether all of it is gone.
        read_only: why it was left alone; None if it was not.
    """

    store: Path
    freed: int
    removed: bool
    read_only: str | None
