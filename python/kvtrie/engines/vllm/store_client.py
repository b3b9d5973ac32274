"""StoreClient: the parts of all ranks in a shared store, which the scheduler asks for.

It only asks whether blocks are there; the workers read and write them.
Invariant: a block counts when the store has the parts of all ranks. Cost: a hash per block and
rank, and a round trip for those of which nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.tiers.remote import Found, RemoteStorage
from kvtrie.tiers.remote.open import read_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings

__all__ = ["StoreClient"]


class StoreClient:
    """The storages of one store.

    Args:
        parts: storages, each with the formats of the ranks whose values have its length.
    """

    def __init__(self, parts: Sequence[tuple[RemoteStorage, list[ValueFormat]]]) -> None:
        self._parts = parts

    @classmethod
    def of_server(
        cls,
        settings: Settings,
        model: ServedModel,
        opened: Mapping[int, Opened],
        clock: Callable[[], int],
    ) -> Self | None:
        """The client of a server; None if it has no store, or uses only what it wrote itself.

        Raises:
            ConfigError: a store or secret that cannot be opened.
        """
        tier = settings.tiers[-1] if settings.tiers else None
        if tier is None or tier.kind != "remote" or tier.lookup == "local":
            return None
        secret = read_secret(tier.secret_file)
        forms: dict[tuple[int, int], list[ValueFormat]] = {}
        for names in sorted({each.names for each in opened.values() if each.names is not None}):
            forms.setdefault((names.layers, names.layer_bytes), []).append(names.format(secret))
        parts = [
            (
                RemoteStorage(
                    tier.path or "",
                    model.shape,
                    model.block_tokens,
                    form=same[0],
                    trust_s=tier.trust_s,
                    clock=clock,
                ),
                same,
            )
            for same in forms.values()
        ]
        return cls(parts)

    def find(self, keys: NDArray[np.uint8], deadline: int) -> Found:
        """Return the leading blocks that the store has, as `RemoteStorage.find`."""
        answers = [storage.find(keys, deadline, forms) for storage, forms in self._parts]
        return Found(
            min(each.blocks for each in answers),
            sum(each.queried for each in answers),
            sum(each.refuted for each in answers),
            sum(each.late for each in answers),
        )

    def refute(self, keys: Sequence[bytes]) -> None:
        """Note that blocks could not be read: they are not asked for again for a while."""
        for storage, forms in self._parts:
            storage.refute(keys, forms)

    def forget(self) -> None:
        """Drop all beliefs; the store keeps its blocks."""
        for storage, _ in self._parts:
            storage.forget()

    def close(self) -> None:
        """Give the connections back."""
        for storage, _ in self._parts:
            storage.close()
