"""ServedCache: the manager of a server's KV, its tiers, and the scheduler's shared state.

Cost: loads the indexes of earlier servers once.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvtrie import BlockManager, Index
from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.vllm.events import PublishedBlocks
from kvtrie.engines.vllm.identity import Identity
from kvtrie.engines.vllm.metrics import ConnectorCounters
from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.engines.vllm.page_slots import PageSlots
from kvtrie.engines.vllm.restored import (
    DISK,
    HOST,
    keys_with_images,
    load_indexes,
    on_every_rank,
    opened_tiers,
    root_key,
)
from kvtrie.engines.vllm.store_client import StoreClient
from kvtrie.engines.vllm.store_moves import StoreMoves
from kvtrie.engines.vllm.unverified_blocks import UnverifiedBlocks
from kvtrie.model.group_pages import GroupPages
from kvtrie.transfer.dispatch import Dispatch
from kvtrie.transfer.remote_stores import write_limit
from kvtrie.transfer.used_blocks import UsedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtrie import Lease
    from kvtrie.engines.vllm.changes import Naming
    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.tier import Tier

__all__ = ["DISK", "HOST", "ServedCache"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_MOST_EVENTS = 1 << 20  # between two steps. An event takes memory only until it is read


class ServedCache:
    """The state of a server's KV, shared by all parts of the scheduler.

    Args:
        settings: the operator's settings.
        model: the served KV.
        opened: the workers' tiers, by rank.
        naming: vLLM's hashes of blocks, for events.
        clock: nanoseconds, monotone.

    Attributes:
        native: the native blocks at the start of prompts.
        size: tokens of a block.
        layers: layers of a whole block, in its first group.
        groups: the groups of the model's layers.
        slots: the slots of vLLM's memory.
        manager: the manager.
        disk: index of its disk tier, or None.
        remote: index of its shared store, or None.
        host_blocks: blocks of its host memory.
        used: blocks with ages to write down, by tier kept for the next server.
        moves: its moves in flight.
        published: blocks published as KV events, or None without events.
        unverified: unverified blocks of an earlier server in host memory.
        identity: the weights and adapters of the requests.
        store: the parts of all ranks in a shared store, or None if it is not queried.
        counters: the connector's counters.
        boundary: contains exceptions caused by the content of requests.
        step: the number of the next step.
        resetting: whether a reset waits for copies to end.
    """

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        opened: Mapping[int, Opened],
        *,
        naming: Naming | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.native = NativeFirst.of(settings, model)
        self.size, self.layers, self.clock = model.block_tokens, model.first_layers, clock
        self.groups, self.slots = model.groups, PageSlots(model.groups, model.blocks)
        tiers = opened_tiers(settings, model, opened, self.native)
        at = {tier.kind: index for index, tier in enumerate(tiers)}
        self.disk, self.remote = at.get("disk"), at.get("remote")
        self.manager = BlockManager(
            model.shape,
            tiers,
            block_tokens=self.size,
            policy=settings.policy,
            objective=settings.objective,
            ranks=len(opened),
            events=_MOST_EVENTS if settings.events else 0,
            events_of="residency",
            explain=settings.why,
            resume=model.resume,
            secret=None if (sharing := settings.sharing.open()) is None else sharing.secret,
        )
        self.host_blocks = self.manager.stats().tiers["host"].slots
        rows = {
            HOST: [each.kept_rows for each in opened.values() if each.kept_rows is not None],
            DISK: [each.rows for each in opened.values() if each.rows is not None],
        }
        self.published = None
        if settings.events:
            self.published = PublishedBlocks(
                [len(group.names) for group in model.groups],
                naming,
                root_key(model, tiers[HOST]),
                keys_with_images([*rows[DISK], *rows[HOST]]),
                last=HOST if self.disk is None else DISK,
                hashes=model.hashes,
                needs=self.manager.resume_needs if len(model.groups) > 1 else None,
            )
        kept = tiers[HOST].keep is not None
        lasting = [HOST] * kept + [DISK] * (self.disk is not None)
        self.used = {tier: UsedBlocks(self.manager, tier) for tier in lasting}
        left = {tier: on_every_rank(rows[tier]) for tier in lasting}
        load_indexes(self.manager, left, clock())
        self.unverified = UnverifiedBlocks(left[HOST] if kept else Index(), len(opened))
        dispatch = Dispatch(self.manager, len(opened))
        self.moves = StoreMoves(self.manager, dispatch, self.remote, _most_writes(model, tiers))
        self.identity = Identity({rank: one.weights for rank, one in opened.items()}, model.blocks)
        self.store = StoreClient.of_server(settings, model, opened, clock)
        self.counters = ConnectorCounters()
        self.boundary = Boundary("kvtrie", _LOG, clock)
        self.step, self.resetting = 0, False

    def use(self, lease: Lease) -> None:
        """Record a use of a lease's blocks, for tiers kept for the next server."""
        for used in self.used.values():
            used.use(lease.handles)

    def clear(self) -> None:
        """Empty the manager. No move may be in flight."""
        self.manager.reset()
        self.moves.clear()
        if self.store is not None:
            self.store.forget()
        self.used = {tier: UsedBlocks(self.manager, tier) for tier in self.used}
        self.unverified.clear()
        self.resetting = False


def _most_writes(model: ServedModel, tiers: Sequence[Tier]) -> int:
    """Return the most blocks in concurrent writes to a shared store.

    This is `write_limit` in blocks, by default an eighth of host memory: the most a worker starts.
    """
    blocks, block = tiers[HOST].blocks or 0, model.shape.block_bytes(model.block_tokens)
    if model.resume is not None:
        pages = GroupPages.of(model.shape, tiers[HOST], model.block_tokens)
        block = max(pages.slots)
        blocks = pages.bytes // block
    remote = [tier for tier in tiers if tier.kind == "remote"]
    return max([1, *(write_limit(tier, blocks, block) // block for tier in remote)])
