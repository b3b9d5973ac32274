"""The start-up line of a vLLM server, from the tiers of its workers.

Cost: once per server.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.engines.server.startup import (
    OpenTier,
    count_text,
    log_startup,
    startup_line,
    startup_warnings,
)
from kvtrie.model.group_pages import GroupPages
from kvtrie.model.layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie import BlockManager, TierStats
    from kvtrie.engines.server.format_figure import FormatFigure
    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.tier import Tier

__all__ = ["log_start"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers


def log_start(
    settings: Settings,
    model: ServedModel,
    opened: Mapping[int, Opened],
    manager: BlockManager,
    *,
    figures: Sequence[FormatFigure] = (),
) -> None:
    """Log the tiers of a server, and warnings about its machine.

    Args:
        settings: the operator's settings, with sizes of a rank.
        model: the served KV.
        opened: the tiers of each worker.
        manager: the manager over them, with the blocks of earlier runs on disks.
        figures: formats of the tiers and their costs.
    """
    # Latent KV is stored once for all tensor-parallel ranks of a stage.
    parts = model.stages if model.replicated else model.ranks
    each = {
        kind: parts * _block_bytes(model, name)
        for kind, name in (
            ("host", settings.format),
            ("disk", settings.disk_format),
            ("remote", settings.format),
        )
    }
    tiers = manager.stats().tiers
    paths = {tier.kind: tier.path or tier.keep for tier in settings.tiers or ()}
    kept = any(tier.keep for tier in settings.tiers or ())
    lines = [
        OpenTier(
            kind,
            tiers[kind].slots * each[kind],
            tiers[kind].slots,
            found=tiers[kind].slots - tiers[kind].free,
            others=max(one.others for one in opened.values()) if kind == "disk" else 0,
            path=paths.get(kind),
            pinned=kind == "host" and any(one.pinned for one in opened.values()),
            kept=kind == "host" and kept,
        )
        for kind in ("host", "disk", "remote")
        if kind in tiers
    ]
    if model.resume is not None:
        budgets = zip(lines, manager.tiers[1:], strict=True)
        lines = [_shared(line, model, tier, tiers[tier.kind]) for line, tier in budgets]
    line = startup_line(
        lines, block_tokens=model.block_tokens, ranks=model.ranks, policy=settings.policy
    )
    warnings = startup_warnings(lines, gpu_blocks=model.blocks)
    for figure in figures:
        _LOG.log(
            logging.INFO if figure.kl_mean is not None else logging.WARNING, "%s", figure.text()
        )
    log_startup(_LOG, line, warnings)


def _shared(line: OpenTier, model: ServedModel, tier: Tier, stats: TierStats) -> OpenTier:
    """Return the line of a tier shared by the groups of a model."""
    if line.kind == "remote":
        return line
    pages = GroupPages.of(model.shape, tier, model.block_tokens)
    rooms: list[str] = []
    for group, each in zip(model.groups, pages.per_page, strict=True):
        slots = pages.count * each
        of = f"of group {group.number}"
        tokens = f"{count_text(slots * model.block_tokens)} tokens {of}"
        rooms.append(f"{count_text(slots)} states {of}" if group.state else tokens)
    held = zip(stats.groups, pages.slots, strict=True)
    filled = sum((slots.held + slots.released) * size for slots, size in held)
    found = line.blocks * filled // pages.bytes
    return replace(line, bytes=model.ranks * pages.bytes, found=found, rooms=tuple(rooms))


def _block_bytes(model: ServedModel, name: str) -> int:
    """Return the bytes of a rank's block in a format."""
    shape, layout = model.shape, FORMATS[name]
    if layout is None:
        return shape.block_bytes(model.block_tokens)
    sizes = layout.planes(model.block_tokens, shape.rank_heads, shape.head_dim)
    return shape.layers * sum(sizes)
