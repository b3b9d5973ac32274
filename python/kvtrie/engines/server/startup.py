"""The start-up line: the tiers of a server, logged once by its scheduler, and warnings.

Invariant: sizes are for the whole server. With several ranks, the share of a rank is added.
Cost: a few small files, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.settings.argument import masked
from kvtrie.settings.machine import IN_MEMORY, ON_NETWORK, file_system, locked_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from logging import Logger

__all__ = [
    "OpenTier",
    "count_text",
    "grouped",
    "log_startup",
    "size_text",
    "startup_line",
    "startup_warnings",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_MILLION = 1_000_000
_LEGIBLE = 100


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier of a server after its start.

    Attributes:
        kind: "gpu", "host", "disk" or "remote".
        bytes: bytes of all ranks, 0 if the engine owns them.
        blocks: its room in blocks.
        found: blocks left by an earlier run.
        others: blocks of different models in the same folder.
        path: the folder of a disk, the file of kept host memory, or the URL of a shared store.
        pinned: whether its memory is locked.
        kept: whether it is host memory kept for the next server.
        rooms: with several groups of layers sharing its bytes, the tokens or states of each group,
            if the group had all bytes.
    """

    kind: str
    bytes: int
    blocks: int
    found: int = 0
    others: int = 0
    path: str | None = None
    pinned: bool = False
    kept: bool = False
    rooms: tuple[str, ...] = ()


def startup_line(
    tiers: Sequence[OpenTier], *, block_tokens: int, ranks: int = 1, policy: str = ""
) -> str:
    """Return the line logged by a server when its tiers are open.

    Args:
        tiers: the tiers of kvtrie, in order.
        block_tokens: tokens per block.
        ranks: processes with a part of each block.
        policy: the eviction policy, "" to omit it.
    """
    parts = [_tier(tier, block_tokens, ranks) for tier in tiers]
    parts += [f"block {block_tokens} tokens", f"{ranks} rank{'s' * (ranks > 1)}"]
    return "kvtrie: " + "; ".join(parts + [f"policy {policy}"] * bool(policy))


def startup_warnings(
    tiers: Sequence[OpenTier],
    *,
    gpu_blocks: int | None = None,
    kind_of: Callable[[str], str] = file_system,
    limit: Callable[[], int | None] = locked_limit,
) -> list[str]:
    """Return a sentence for each property of the machine that makes tiers useless or slow.

    Args:
        tiers: the tiers of kvtrie.
        gpu_blocks: blocks of the cache above the tiers.
        kind_of: returns the type of the file system of a folder.
        limit: returns the limit of locked memory in bytes, None for no limit.
    """
    warnings: list[str] = []
    for tier in tiers:
        if tier.kind == "host" and gpu_blocks is not None and tier.blocks < gpu_blocks:
            wanted = tier.bytes * gpu_blocks // tier.blocks
            warnings.append(
                f"the host tier has {grouped(tier.blocks)} blocks and the GPU cache "
                f"{grouped(gpu_blocks)}: nearly all of the host tier is also in GPU memory, so it "
                f"can add almost nothing; more than {size_text(wanted)} wanted"
            )
        locked = limit() if tier.pinned else None
        if locked is not None and locked < tier.bytes:
            warnings.append(
                f"the limit of locked memory is {size_text(locked)}, below the host tier of "
                f"{size_text(tier.bytes)}: set `ulimit -l unlimited`"
            )
        local = tier.path is not None and not tier.kept and tier.kind != "remote"
        kind = kind_of(tier.path) if local and tier.path is not None else ""
        if kind in IN_MEMORY:
            warnings.append(
                f"the disk folder {tier.path} is on {kind}: its blocks take memory, and are lost "
                "when the machine restarts"
            )
        elif kind in ON_NETWORK:
            warnings.append(
                f"the disk folder {tier.path} is on {kind}: its locks and writes depend on a "
                "server on the network; use a local disk"
            )
    return warnings


def log_startup(log: Logger, line: str, warnings: Sequence[str]) -> None:
    """Log the line of a server, then its warnings."""
    log.info("%s", line)
    for warning in warnings:
        log.warning("kvtrie: %s", warning)


def size_text(size: int) -> str:
    """Format bytes with a binary unit, as `8.0 GiB` or `200 GiB`."""
    number, unit = float(size), 0
    while number >= _STEP and unit < len(_UNITS) - 1:
        number, unit = number / _STEP, unit + 1
    return f"{number:.{0 if number >= _LEGIBLE or not unit else 1}f} {_UNITS[unit]}"


def grouped(number: int) -> str:
    """Format a number in groups of three digits, as `131 072`."""
    return f"{number:,}".replace(",", " ")


def count_text(number: int) -> str:
    """Format a number in digits, or in millions with one decimal, as `1.6 M`."""
    return f"{number / _MILLION:.1f} M" if number >= _MILLION else grouped(number)


def _tier(tier: OpenTier, block_tokens: int, ranks: int) -> str:
    if tier.kind == "remote":  # its slots say nothing about the room of the store
        return f"remote {masked(tier.path or '')}"
    room = " or ".join(tier.rooms) or f"{count_text(tier.blocks * block_tokens)} tokens"
    each = f" ({ranks} x {size_text(tier.bytes // ranks)})" if ranks > 1 else ""
    size = f" {size_text(tier.bytes)}{each} =" if tier.bytes else ""
    text = f"{tier.kind}{size} {room}"
    if tier.path is None:
        return text
    if tier.kept:
        text += f", kept in {tier.path}"
    text += f", {100 * tier.found // tier.blocks} % filled by an earlier run"
    return text + (f" ({grouped(tier.others)} blocks of another model ignored)" * (tier.others > 0))
