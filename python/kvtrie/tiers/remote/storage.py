"""RemoteStorage: the storage of the `remote` tier, for the executor of one rank.

A model whose groups of layers are kept apart has a value per block and group: each group has a
storage with its names, lengths and connections. A value that is lost is a miss of that group.
Invariant: that of `RemoteClient`, which has the blocks. Cost: that of the client; a copy of blocks
that are in memory of a device.
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
    """The blocks of one rank in a shared store.

    Args:
        url: where the store is; see `kvtrie.tiers.remote`.
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        block_tokens: tokens per block.
        layout: layout of a layer of a block in the pools; None is kvtrie's default.
        rank: the tensor-parallel rank whose part of the KV this is.
        ranks: how many there are. Latent KV is equal on all ranks, which share its blocks.
        secret: keys names and checksums, so that other users of the store can neither find nor
            replace blocks unnoticed.
        trust_s: seconds for which a belief is used without asking the store again; None is 60.
        lookup: "all" asks the store, "local" uses only what this process has written or read; None
            is "all".
        store: the store, if it is open already.
        form: names and checksums, if they are not those of `rank` of `ranks`.
        clock: nanoseconds, as `time.monotonic_ns`.
        group: the group of layers whose values these are; None has all layers.
        rest: the storages of the groups after it.

    Attributes:
        block_format: format of the bytes.
        form: names and checksums.
        url: where the store is.
        breaker: the circuit breaker.

    Raises:
        ConfigError: a model without a fingerprint, a layout with K and V apart, a bad URL; a store
            that is unreachable, with `strict=1` in the URL.
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
        """The storage of each group of layers; that of the first group is this one."""
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
        apart: bool = False,
        forms: Sequence[ValueFormat] | None = None,
    ) -> Self:
        """The storage that a tier asks for.

        Args:
            model: the shape whose KV is kept.
            tier: its path, layout, secret, trust and lookup.
            block_tokens: tokens per block.
            rank: the tensor-parallel rank whose part of the KV this is.
            ranks: how many there are.
            apart: whether the groups of the model's layers are kept apart.
            forms: names and checksums by group, if they are not those of `rank` of `ranks`.

        Raises:
            ConfigError: a tier without a path, or with layer slots; as of the class.
        """
        if tier.path is None:
            raise ConfigError("a remote tier with a store needs a path")
        if tier.layer_slots:
            raise ConfigError(
                "a remote store keeps a block's layers in one value: layer_slots=False"
            )
        url = RemoteUrl.parse("path of tier 'remote'", tier.path)
        secret = read_secret(tier.secret_file)
        numbers = range(len(model.groups)) if apart else (None,)
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
        """The counters now, of all groups together."""
        parts = [RemoteClient.stats(part) for part in self.groups]
        return RemoteStats.together(parts)

    def forget(self) -> None:
        """Drop all beliefs; the store keeps its blocks."""
        for part in self.groups:
            RemoteClient.forget(part)

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        with ExitStack() as closing:
            for part in self.groups:
                closing.callback(RemoteClient.close, part)

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Fill `memory` with layers `[lo, hi)` of the block `key`, proved.

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
        """Store the block `key`, unless the store has it.

        Raises:
            TransferError: the block could not be written.
        """
        (why,) = self.write_many([(key, slot, layers, memory.cpu(), label)])
        if why is not None:
            raise TransferError(why)
