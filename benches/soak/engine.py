"""An engine without a model that replays traces over three tiers of real bytes, and trusts none.

It computes a pattern of its tokens, so it knows every byte that it should read: it
compares all that a lease found when the loads are there, and all that the lease holds once more
before it lets go.
Some reads of the disk fail as planned: what is lost so is computed again. Anything else that fails
is an error.
Invariant: a few requests are under way at a time, and a sequence fits that often on the first tier.
Cost: the pattern of a sequence once, and its bytes twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from benches.soak.asks import SIZE
from benches.soak.pattern import Pattern
from benches.soak.storage import PLANNED, Flaky
from kvtrie import BlockManager, ModelShape, NoSpaceError, Tier
from kvtrie.settings.hint import Release
from kvtrie.tiers import open_pools
from kvtrie.tiers.kept import KeptPool
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benches.soak.asks import Ask
    from kvtrie import Lease, Scope

SHAPE = ModelShape(layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", fingerprint="soak")
HEADS = SHAPE.kv_heads, SHAPE.head_dim
WORDS = SHAPE.kv_heads * SHAPE.head_dim * 2 // 8
AT_ONCE = 4
WORKERS = 2
MOST_REPORTED = 5
RECENT = 64
PATIENCE_S = 60.0


class Engine:
    """Serves requests and counts.

    Args:
        rooms: blocks of gpu, host and disk.
        folder: where the disk tier's files are.
        keep: the file that is the host tier's memory; None for memory that ends with the process.
            With it the engine finds the blocks of an earlier one again.

    Attributes:
        manager: decides.
        pools: the bytes, per tier.
        disk: the last of them.
        most: tokens that a request may have.
        requests: requests that have ended.
        read: blocks that were found and compared.
        checked: bytes that were compared.
        wrong: layers of blocks with other bytes than they must have.
        what: the first things that went wrong.
        recent: the last requests that were not given up.
        restored: blocks of an earlier engine on the host tier.
    """

    def __init__(self, rooms: Sequence[int], folder: Path, keep: Path | None = None) -> None:
        gpu, host, disk = rooms
        tiers = [
            Tier("gpu", gpu, free_low=0.25),
            Tier("host", host, free_low=0.1, keep=None if keep is None else str(keep)),
            Tier("disk", disk, path=str(folder)),
        ]
        self.manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        self.disk = Flaky.of_tier(SHAPE, tiers[2], SIZE)
        self.pools = (*open_pools(SHAPE, tiers[:2], SIZE), self.disk)
        self.executor = Executor(self.manager, self.pools, workers=WORKERS, deadline_s=PATIENCE_S)
        self.most = gpu // AT_ONCE * SIZE
        self.requests = self.read = self.checked = self.wrong = 0
        self.what: list[str] = []
        self.recent: deque[Ask] = deque(maxlen=RECENT)
        self.restored = 0
        if keep is not None:
            self.executor.restore()
            self.restored = self.manager.stats().tiers["host"].copies
        self._pattern = Pattern(SHAPE.layers, WORDS, self.most)
        self._active: deque[tuple[Lease, Ask]] = deque()

    def close(self) -> None:
        """End the executor and give folder and file back."""
        self.executor.close()
        self.disk.close()
        if isinstance(self.pools[1], KeptPool):
            self.pools[1].close()

    @property
    def healthy(self) -> bool:
        """Whether nothing has gone wrong."""
        return not self.what

    def serve(self, ask: Ask) -> None:
        """Begin a request, and end the oldest one if too many are under way.

        Raises:
            NoSpaceError: there is no room though nothing is leased and nothing moves.
        """
        if len(self._active) == AT_ONCE:
            self._end()
        try:
            lease = self._acquire(ask)
        except NoSpaceError:
            self.finish_and_audit()
            lease = self._acquire(ask)
        self._active.append((lease, ask))
        self.executor.poll()

    def finish_and_audit(self) -> None:
        """End all requests, wait until nothing moves any more, and check every invariant."""
        while self._active:
            self._end()
        self.executor.drain()
        self._note_failures()
        self.manager.audit()

    def _acquire(self, ask: Ask) -> Lease:
        answer = len(ask.tokens) - ask.prompt
        prompt = ask.tokens[: ask.prompt]
        return self.manager.acquire(
            prompt,
            now=self.executor.clock(),
            scope=ask.scope,
            session=ask.session,
            reserve=answer,
            load="all",
        )

    def _end(self) -> None:
        lease, ask = self._active.popleft()
        self.executor.wait(lease)
        self._note_failures()
        if self.healthy and not ask.given_up:
            self._reserve(lease, len(ask.tokens) - lease.matched)
            self.executor.wait(lease)
            expected, found = self._pattern.of(ask.tokens, _marks(ask.scope)), lease.matched
            readable = np.zeros(expected.shape[:2], dtype=bool)
            readable[:, :found] = True
            for layer in range(SHAPE.layers):  # loads that found no room on the host
                readable[layer, lease.plan.recompute(layer)] = False
            self._compare(lease, expected, readable)
            self.read += int(readable.all(axis=0).sum()) // SIZE
            self._compute(lease, expected, ~readable)
            lease.commit(ask.tokens[found : ask.prompt], now=self.executor.clock())
            lease.commit(ask.tokens[ask.prompt :], now=self.executor.clock())
            self._compare(lease, expected, np.ones_like(readable))
            self.recent.append(ask)
        lease.release(now=self.executor.clock())
        if ask.over:
            over = Release(session=ask.session, scope=ask.scope)
            self.manager.hint([over], now=self.executor.clock())
        self.executor.poll()
        self.requests += 1

    def _reserve(self, lease: Lease, tokens: int) -> None:
        """Room for what is computed: a load that failed took its own along."""
        try:
            lease.reserve(tokens, now=self.executor.clock())
        except NoSpaceError:
            self.executor.drain()  # finished offloads make room
            lease.reserve(tokens, now=self.executor.clock())

    def _note_failures(self) -> None:
        reasons = [row.reason for row in self.manager.failed()]
        unplanned = [reason for reason in reasons if PLANNED not in reason]
        self._note([f"request {self.requests}: {reason}" for reason in unplanned])

    def _note(self, what: Sequence[str]) -> None:
        self.what = (self.what + list(what))[:MOST_REPORTED]

    def _rows(self, lease: Lease, which: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Units and offsets of some tokens; `which` is bool `(layers, tokens)`."""
        layers, at = (torch.from_numpy(axis) for axis in np.nonzero(which))
        units = self.pools[0].table(lease.slots(0)).cpu()[layers, at // SIZE]
        return units.to(self.pools[0].device), (at % SIZE).to(self.pools[0].device)

    def _compute(self, lease: Lease, expected: np.ndarray, which: np.ndarray) -> None:
        bits = torch.from_numpy(expected[which].view(np.int64)).to(self.pools[0].device)
        keys, values = bits.view(torch.bfloat16).unflatten(-1, HEADS).unbind(1)
        self.pools[0].scatter(*self._rows(lease, which), keys, values)

    def _compare(self, lease: Lease, expected: np.ndarray, which: np.ndarray) -> None:
        gathered = self.pools[0].gather(*self._rows(lease, which))
        bits = torch.stack(gathered, dim=1).flatten(2).cpu().view(torch.int64).numpy()
        other = (bits.view(np.uint64) != expected[which]).any(axis=(1, 2))
        self.checked += bits.nbytes
        if other.any():
            layers, at = (axis[other].tolist() for axis in np.nonzero(which))
            wrong = sorted(
                {(token // SIZE, layer) for token, layer in zip(at, layers, strict=True)}
            )
            self.wrong += len(wrong)
            places = [f"block {block}, layer {layer}" for block, layer in wrong[:MOST_REPORTED]]
            self._note([f"request {self.requests}: other bytes in {place}" for place in places])


def _marks(scope: Scope) -> list[tuple[int, bytes]]:
    """Marks of a sequence and their positions: its tenant is before all tokens."""
    return [(0, b"tenant " + scope.tenant), *scope.extra]
