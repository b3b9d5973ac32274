"""StoreClient: lookups of all ranks' block parts in a shared store, from the scheduler.

It only queries the presence of blocks. The workers read and write them.
With several groups of layers a block has a value for each of them.
Invariant: a block of a group counts when the store has the parts of all ranks. Cost: a hash per
block, group and rank, and a round trip for unknown blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.tiers.remote import Found, RemoteStorage
from kvtrie.tiers.remote.open import read_secret
from kvtrie.tiers.remote.search import least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self, TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers.remote.form import ValueNames
    from kvtrie.tiers.remote.search import Answer

    _Parts: TypeAlias = list[tuple[RemoteStorage, list[ValueFormat]]]

__all__ = ["StoreClient"]


class StoreClient:
    """The storages of a store.

    Args:
        groups: by group of layers its storages, a storage per length of values, with the formats of
            the ranks with this length.
    """

    def __init__(self, groups: Sequence[_Parts]) -> None:
        self._groups = groups

    @classmethod
    def of_server(
        cls,
        settings: Settings,
        model: ServedModel,
        opened: Mapping[int, Opened],
        clock: Callable[[], int],
    ) -> Self | None:
        """Create the client of a server, or return None without a store or with local lookups.

        Raises:
            ConfigError: the store or the secret cannot be opened.
        """
        tier = settings.tiers[-1] if settings.tiers else None
        if tier is None or tier.kind != "remote" or tier.lookup == "local":
            return None
        ranks = {each.names for each in opened.values() if each.names is not None}
        separate_groups = model.resume is not None
        return cls(
            [
                _parts(tier, model, group if separate_groups else None, names, clock)
                for group, names in enumerate(zip(*ranks, strict=True))
            ]
        )

    def find(self, keys: NDArray[np.uint8], deadline: int) -> Found:
        """Return the leading blocks of the first group of layers in the store."""
        answers = [storage.find(keys, deadline, forms) for storage, forms in self._groups[0]]
        return Found(
            min(each.blocks for each in answers),
            sum(each.queried for each in answers),
            sum(each.refuted for each in answers),
            sum(each.late for each in answers),
        )

    def answers(self, group: int, keys: NDArray[np.uint8], deadline: int) -> list[Answer]:
        """Return the store's answers about blocks of a group, as `RemoteStorage.answers`."""
        parts = (storage.answers(keys, deadline, forms) for storage, forms in self._groups[group])
        return [least(each) for each in zip(*parts, strict=True)]

    def refute(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Record failed reads of blocks: they are not queried again for a while.

        Args:
            blocks: their groups and keys.
        """
        for group, key in blocks:
            for storage, forms in self._groups[group]:
                storage.refute([key], forms)

    def forget(self) -> None:
        """Forget all cached answers. The store keeps its blocks."""
        for storage in self._storages():
            storage.forget()

    def close(self) -> None:
        """Close the connections."""
        for storage in self._storages():
            storage.close()

    def _storages(self) -> list[RemoteStorage]:
        return [storage for parts in self._groups for storage, _ in parts]


def _parts(
    tier: Tier,
    model: ServedModel,
    group: int | None,
    names: Iterable[ValueNames],
    clock: Callable[[], int],
) -> _Parts:
    """Return the storages of a group of layers (None for a single group), for all ranks."""
    secret = read_secret(tier.secret_file)
    forms: dict[tuple[int, int], list[ValueFormat]] = {}
    for each in sorted(set(names)):
        forms.setdefault((each.layers, each.layer_bytes), []).append(each.format(secret))
    return [
        (
            RemoteStorage(
                tier.path or "",
                model.shape,
                model.block_tokens,
                form=same[0],
                trust_s=tier.trust_s,
                clock=clock,
                group=group,
            ),
            same,
        )
        for same in forms.values()
    ]
