"""An engine without a model that replays traces over three tiers of real bytes, and trusts none.

What it computes is the pattern of its tokens, so it knows every byte that it should read: it
compares all that a lease found when the loads are there, and all that the lease holds once more
before it lets go.
Invariant: a few requests are under way at a time, and a sequence fits that often on the first tier.
Cost: the pattern of a sequence once, and its bytes twice.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from benches.soak.pattern import Pattern
from kvtrie import BlockManager, ModelShape, NoSpaceError, Tier
from kvtrie.sim.workloads import FAMILIES
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtrie import Lease

SHAPE = ModelShape(layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", fingerprint="soak")
SIZE = 16
SCALE = 512 // SIZE  # tokens of the trace that one of ours stands for
HEADS = SHAPE.kv_heads, SHAPE.head_dim
WORDS = SHAPE.kv_heads * SHAPE.head_dim * 2 // 8
AT_ONCE = 4
WORKERS = 2
ROUND = 2000
TOLD = 5
PATIENCE_S = 60.0


class Ask(NamedTuple):
    """A request: its prompt and its answer, uint32, and how many of them are the prompt."""

    tokens: np.ndarray
    prompt: int


def asks(seed: int, most: int) -> Iterator[Ask]:
    """Requests without end: all families of workloads in turn, each time with another seed.

    Args:
        seed: of the first.
        most: tokens of prompt and answer; longer ones are cut.
    """
    names, first = list(FAMILIES), 0
    for turn in count():
        trace = FAMILIES[names[turn % len(names)]](requests=ROUND, seed=seed + turn)
        for request in trace:
            answer = min(1 + request.output_tokens // SCALE, most // 2)
            prompt = min(-(-request.input_tokens // SCALE), most - answer)
            blocks = (first + request.blocks.astype(np.int64)) % 2**32
            tokens = np.repeat(blocks, SIZE)[:prompt]
            fresh = np.full(answer, tokens[-1])
            yield Ask(np.concatenate([tokens, fresh]).astype(np.uint32), prompt)
        first += 1 + max(int(request.blocks.max()) for request in trace)


class Engine:
    """Serves requests and counts.

    Args:
        rooms: blocks of gpu, host and disk.
        folder: where the disk tier's files are.

    Attributes:
        manager: decides.
        pools: the bytes, per tier.
        most: tokens that a request may have.
        requests: requests that have ended.
        read: blocks that were found and compared.
        checked: bytes that were compared.
        wrong: layers of blocks with other bytes than they must have.
        what: the first things that went wrong.
    """

    def __init__(self, rooms: Sequence[int], folder: Path) -> None:
        gpu, host, disk = rooms
        tiers = [
            Tier("gpu", gpu, free_low=0.25),
            Tier("host", host, free_low=0.1),
            Tier("disk", disk, path=str(folder)),
        ]
        self.manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        self.pools = open_pools(SHAPE, tiers, SIZE)
        self.executor = Executor(self.manager, self.pools, workers=WORKERS, deadline_s=PATIENCE_S)
        self.most = gpu // AT_ONCE * SIZE
        self.requests = self.read = self.checked = self.wrong = 0
        self.what: list[str] = []
        self._pattern = Pattern(SHAPE.layers, WORDS, self.most)
        self._held: deque[tuple[Lease, Ask]] = deque()

    def close(self) -> None:
        """End the executor and give the folder back."""
        self.executor.close()
        self.pools[2].close()

    @property
    def healthy(self) -> bool:
        """Whether nothing has gone wrong."""
        return not self.what

    def serve(self, ask: Ask) -> None:
        """Begin a request, and end the oldest one if too many are under way.

        Raises:
            NoSpaceError: there is no room though nothing is leased and nothing moves.
        """
        if len(self._held) == AT_ONCE:
            self._end()
        try:
            lease = self._acquire(ask)
        except NoSpaceError:
            self.settle()
            lease = self._acquire(ask)
        self._held.append((lease, ask))
        self.executor.poll()

    def settle(self) -> None:
        """End all requests, wait until nothing moves any more, and check every invariant."""
        while self._held:
            self._end()
        self.executor.drain()
        self._note_failures()
        self.manager.audit()

    def _acquire(self, ask: Ask) -> Lease:
        answer = len(ask.tokens) - ask.prompt
        prompt = ask.tokens[: ask.prompt]
        return self.manager.acquire(prompt, now=self.executor.clock(), reserve=answer, load="all")

    def _end(self) -> None:
        lease, ask = self._held.popleft()
        self.executor.wait(lease)
        self._note_failures()
        if self.healthy:  # a load that failed took its room along
            expected, found = self._pattern.of(ask.tokens), lease.matched
            known = np.zeros(expected.shape[:2], dtype=bool)
            known[:, :found] = True
            for layer in range(SHAPE.layers):  # what found no room on its way through the host
                known[layer, lease.plan.recompute(layer)] = False
            self._compare(lease, expected, known)
            self.read += int(known.all(axis=0).sum()) // SIZE
            self._compute(lease, expected, ~known)
            lease.commit(ask.tokens[found : ask.prompt], now=self.executor.clock())
            lease.commit(ask.tokens[ask.prompt :], now=self.executor.clock())
            self._compare(lease, expected, np.ones_like(known))
        lease.release(now=self.executor.clock())
        self.executor.poll()
        self.requests += 1

    def _note_failures(self) -> None:
        self._note([f"request {self.requests}: {row.reason}" for row in self.manager.failed()])

    def _note(self, what: Sequence[str]) -> None:
        self.what = (self.what + list(what))[:TOLD]

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
            told = [f"block {block}, layer {layer}" for block, layer in wrong[:TOLD]]
            self._note([f"request {self.requests}: other bytes in {place}" for place in told])
