"""RemoteStorage: the storage of the `remote` tier, for the executor of a rank.

A model with separate groups of layers has a value per block and group. Each group has a storage
with its names, lengths and connections. A lost value is a miss of its group.
Invariant: as for `RemoteClient`, the owner of the blocks.
Cost: as for the client, and a copy of blocks in device memory.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import torch

from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.shape import require_fingerprint
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.remote.client import RemoteClient
from kvtrie.tiers.remote.counts import RemoteStats
from kvtrie.tiers.remote.form import value_format
from kvtrie.tiers.remote.open import read_secret
from kvtrie.tiers.remote.url import RemoteUrl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers.remote.protocol import RemoteStore

__all__ = ["RemoteStorage"]


class RemoteStorage(RemoteClient):
    """The blocks of a rank in a shared store.

    Args:
        url: the URL of the store, see `kvtrie.tiers.remote`.
        model: the shape of the model. Its `fingerprint` must not be empty.
        block_tokens: tokens per block.
        layout: layout of a layer of a block in the pools, or None for kvtrie's default.
        rank: the tensor-parallel rank of this part of the KV.
        ranks: number of ranks. Latent KV is equal on all ranks, so they share its blocks.
        secret: key for names and checksums, so that other users of the store can neither find nor
            replace blocks unnoticed.
        trust_s: seconds during which a belief is used without a query. None means 60.
        lookup: "all" queries the store, "local" uses only blocks written or read by this process.
            None means "all".
        store: the store, if already open.
        form: names and checksums, if different from the names of `rank` of `ranks`.
        clock: nanoseconds, as `time.monotonic_ns`.
        group: the layer group of the values, or None for all layers.
        rest: the storages of the groups after it.

    Attributes:
        block_format: format of the bytes.
        form: names and checksums.
        url: the URL of the store.
        breaker: the circuit breaker.

    Raises:
        ConfigError: a model without a fingerprint, a layout with separate K and V, an invalid URL,
            or, with `strict=1` in the URL, an unreachable store.
    """

    def __init__(
        self,
        url: str | RemoteUrl,
        model: ModelShape,
        block_tokens: int,
        *,
        layout: Layout | None = None,
        rank: int = 0,
        ranks: int = 1,
        secret: bytes | None = None,
        trust_s: float | None = None,
        lookup: Literal["all", "local"] | None = None,
        store: RemoteStore | None = None,
        form: ValueFormat | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        group: int | None = None,
        rest: Self | None = None,
    ) -> None:
        url = url if isinstance(url, RemoteUrl) else RemoteUrl.parse("a remote URL", url)
        require_fingerprint(model, f"the remote store {url}")
        self.block_format = BlockFormat.of_group(model, group, block_tokens, layout)
        form = form or value_format(
            model,
            self.block_format,
            secret,
            rank=rank,
            ranks=ranks,
            group=group,
            block_tokens=block_tokens,
        )
        self._rest = rest
        super().__init__(
            url,
            form,
            self.block_format.layers,
            trust_s=trust_s,
            lookup=lookup,
            store=store,
            clock=clock,
        )

    @property
    def groups(self) -> tuple[Self, ...]:
        """The storage of each group of layers, beginning with this storage for the first group."""
        return (self,) if self._rest is None else (self, *self._rest.groups)

    @classmethod
    def of_tier(
        cls,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        separate_groups: bool = False,
        forms: Sequence[ValueFormat] | None = None,
    ) -> Self:
        """Return the storage of a tier.

        Args:
            model: the shape of the model.
            tier: its path, layout, secret, trust and lookup.
            block_tokens: tokens per block.
            rank: the tensor-parallel rank of this part of the KV.
            ranks: number of ranks.
            separate_groups: whether the model's layer groups are separate.
            forms: names and checksums by group, if different from the names of `rank` of `ranks`.

        Raises:
            ConfigError: a tier without a path, or with layer slots, or an error as for the class.
        """
        if tier.path is None:
            raise ConfigError("a remote tier with a store needs a path")
        if tier.layer_slots:
            raise ConfigError(
                "a remote store keeps a block's layers in one value: layer_slots=False"
            )
        url = RemoteUrl.parse("path of tier 'remote'", tier.path)
        secret = read_secret(tier.secret_file)
        numbers = range(len(model.groups)) if separate_groups else (None,)
        parts: list[Self] = []
        with ExitStack() as opened:
            for group in reversed(numbers):
                part = cls(
                    url,
                    model,
                    block_tokens,
                    layout=tier.layout,
                    rank=rank,
                    ranks=ranks,
                    secret=secret,
                    trust_s=tier.trust_s,
                    lookup=tier.lookup,
                    form=None if forms is None else forms[group or 0],
                    group=group,
                    rest=parts[-1] if parts else None,
                )
                opened.callback(part.close)
                parts.append(part)
            opened.pop_all()
        return parts[-1]

    def stats(self) -> RemoteStats:
        """Return the current counters of all groups together."""
        parts = [RemoteClient.stats(part) for part in self.groups]
        return RemoteStats.together(parts)

    def forget(self) -> None:
        """Drop all beliefs. The store keeps its blocks."""
        for part in self.groups:
            RemoteClient.forget(part)

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        with ExitStack() as closing:
            for part in self.groups:
                closing.callback(RemoteClient.close, part)

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read and verify layers `[lo, hi)` of the block `key` into `memory`.

        Raises:
            TransferError: the block could not be read.
        """
        host = memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")
        (why,) = self.read_many([(key, slot, layers, host)])
        if why is not None:
            raise TransferError(why)
        if host is not memory:
            memory.copy_(host)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write the block `key`, unless the store has it.

        Raises:
            TransferError: the block could not be written.
        """
        (why,) = self.write_many([(key, slot, layers, memory.cpu(), label)])
        if why is not None:
            raise TransferError(why)
