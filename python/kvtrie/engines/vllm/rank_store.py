"""The storage of a rank in a shared store, and its counts of failed blocks.

Each tensor-parallel rank and pipeline stage has its own part of a block, with a value per group of
layers. Latent KV is equal on the tensor-parallel ranks of a stage: the first rank writes it, and
all ranks read it.
Invariant: different parts of a block, and parts under different divisions into ranks, have
different names. Cost: none per step without losses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.tiers import BlockFormat
from kvtrie.tiers.remote import RemoteStorage
from kvtrie.tiers.remote.form import ValueNames
from kvtrie.tiers.remote.open import read_secret

if TYPE_CHECKING:
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.model.layout import Layout
    from kvtrie.settings.tier import Tier

__all__ = ["RankStore"]


class RankStore:
    """A storage and its losses.

    Args:
        tier: the remote tier.
        model: the served KV.
        layout: the layout of the rank's host memory, or None for the model's own.
        rank: the rank, among all ranks with a part of the KV.

    Attributes:
        storage: the storage.
        names: the fields in the names of the rank's values, by group of layers.
        writes: whether this rank writes blocks.

    Raises:
        ConfigError: the store or the secret cannot be opened.
    """

    def __init__(self, tier: Tier, model: ServedModel, layout: Layout | None, rank: int) -> None:
        shape, size, wide = model.shape, model.block_tokens, model.shape.tp
        part = (rank // wide, model.stages) if model.replicated else (rank, model.ranks)
        separate_groups = model.resume is not None
        self.names = tuple(
            ValueNames.of(
                BlockFormat.of_group(shape, group, size, layout),
                *part,
                group=group,
                block_tokens=size,
            )
            for group in (range(len(model.groups)) if separate_groups else (None,))
        )
        self.writes = not model.replicated or rank % wide == 0
        secret = read_secret(tier.secret_file)
        self.storage = RemoteStorage.of_tier(
            shape,
            replace(tier, layout=layout),
            size,
            separate_groups=separate_groups,
            forms=[names.format(secret) for names in self.names],
        )
        self._before: Counter[str] = Counter()

    def lost(self) -> dict[str, int]:
        """Return the number of blocks lost since the last call, by reason."""
        stats = self.storage.stats()
        now = Counter(
            {
                f"store {what}: {outcome}": count
                for (what, outcome), count in stats.results.items()
                if outcome != "ok" and what in ("get", "put")
            }
        )
        new, self._before = now - self._before, now
        return dict(new)
