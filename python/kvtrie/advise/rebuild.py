"""Rebuild: the requests of an engine, from its stored blocks.

The ancestors of a request's first stored block were found in the GPU's memory, so the path from the
root to the last stored block is the request's prompt and answer. Chunked prefill and decode store
the path in pieces. A piece extends the open path of the same session that ends at the piece's
parent. Exceptions are a pause of `PAUSE_S`, or of `TURN_S` before several blocks at once: this is
the next turn of a conversation. Single blocks after the last larger piece are the answer.
Invariant: equal names are equal blocks, at any time. Cost: some 150 bytes per distinct block, at
most `most` blocks. Beyond that the oldest requests are forgotten.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvtrie.advise.wire import Batch, Hash, Stored

__all__ = ["MOST_BLOCKS", "PAUSE_S", "TURN_S", "Rebuilt"]

PAUSE_S = 30.0
"""Seconds without a stored block until a path ends."""

TURN_S = 2.0
"""Seconds without a stored block after which several blocks at once begin the next turn."""

MOST_BLOCKS = 8_000_000
"""Maximum number of distinct blocks, about a gigabyte."""

_NS = 1_000_000_000
_BACKWARDS_S = 1.0  # larger jumps of an adjusted clock are refused
_FEW_OPEN = 1024
_BLOCKS_PER_PATH = 4  # with as many paths as blocks, memory would double


@dataclass(slots=True)
class _Path:
    """A request: blocks by their numbers, -1 for none.

    Attributes:
        at: time of its first stored block, in seconds.
        last: time of its last stored block.
        prompt: last block of its prompt.
        tip: its last block.
        session: name of its session.
    """

    at: float
    last: float
    prompt: int
    tip: int
    session: str | None


class Rebuilt:
    """Requests so far.

    Blocks are numbered in order of arrival, in runs: a run's blocks follow each other, and only its
    first block has a parent different from the preceding number.

    Args:
        most: maximum number of distinct blocks.
        keep_tokens: keep token ids of blocks that have them, in 4 bytes each.

    Attributes:
        size: tokens of a block, 0 before the first.
        stored: blocks stored by the engine.
        unknown: blocks with an unseen parent: their requests begin there.
        cleared: number of times the engine dropped all blocks.
        forgotten: requests dropped for lack of room.
        resident: maximum number of blocks in the GPU's memory at a time, according to the events.
        lost: missing sequence numbers, as `[first, last]`.
        first: seconds of the first batch, or None.
        last: seconds of the last batch.
    """

    def __init__(self, most: int = MOST_BLOCKS, *, keep_tokens: bool = False) -> None:
        self._most = most
        self._tokens: dict[int, array[int]] | None = {} if keep_tokens else None
        self._ids: dict[Hash, int] = {}
        self._run = array("I")  # by block
        self._start, self._parent, self._depth = array("q"), array("q"), array("q")  # by run
        self._paths: list[_Path] = []
        self._open: dict[int, _Path] = {}
        self._open_limit = _FEW_OPEN
        self._gpu_blocks: set[Hash] = set()
        self.size = self.stored = self.unknown = self.cleared = self.forgotten = self.resident = 0
        self.lost: list[tuple[int, int]] = []
        self.first: float | None = None
        self.last = 0.0
        self._rank: int | None = None
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def distinct(self) -> int:
        """Number of distinct blocks."""
        return len(self._run)

    @property
    def blocks_on_gpu(self) -> int:
        """Number of blocks in the GPU's memory, according to the events."""
        return len(self._gpu_blocks)

    def add(self, batch: Batch) -> None:
        """Add the events of a step.

        Raises:
            ConfigError: a changed block size or rank, a repeated sequence number, or a clock that
                went back.
        """
        self._check(batch)
        self._next, self.last = batch.number + 1, max(self.last, batch.at)
        if self.first is None:
            self.first = batch.at
        if batch.cleared:
            self.cleared += 1
            self._gpu_blocks.clear()
        self._gpu_blocks.difference_update(batch.removed)
        for stored in batch.stored:
            self._add(stored)
        self.resident = max(self.resident, len(self._gpu_blocks))
        if len(self._run) > self._most or len(self._paths) > self._most // _BLOCKS_PER_PATH:
            self._forget()

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests by their first stored block; times begin with the first batch.

        A prompt's last, partial block is in no event and counts as half a block.
        """
        begin = self.first or 0.0
        for path in self._paths:
            blocks = self._blocks(path.tip)
            prompt = self._length(path.prompt)
            tokens, answer = prompt * self.size + self.size // 2, blocks[prompt:]
            at = max(0, round((path.at - begin) * _NS))
            yield TraceRequest(
                at,
                tokens,
                len(answer) * self.size,
                blocks[:prompt],
                path.session,
                answer if len(answer) else None,
            )

    def tokens(self, blocks: NDArray[np.uint32]) -> NDArray[np.uint32] | None:
        """Return the token ids of blocks, or None unless all of them are kept."""
        found = [(self._tokens or {}).get(block) for block in blocks.tolist()]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        return np.concatenate([np.frombuffer(one, dtype=np.uint32) for one in known])

    def _check(self, batch: Batch) -> None:
        if self._next is None:
            self._rank = batch.rank
        if self._next is not None and (batch.number < self._next or batch.rank != self._rank):
            raise ConfigError(
                f"sequence number {batch.number} of rank {batch.rank} follows {self._next - 1} of "
                f"rank {self._rank}: several publishers on one endpoint, or a server that started "
                "again; listen to one server of one rank"
            )
        if self.first is not None and batch.at < self.last - _BACKWARDS_S:
            raise ConfigError(
                f"the clock went back from {self.last:.3f} s to {batch.at:.3f} s at sequence "
                f"number {batch.number}"
            )
        for stored in batch.stored:
            if self.size and stored.size != self.size:
                raise ConfigError(
                    f"sequence number {batch.number} has blocks of {stored.size} tokens, those "
                    f"before have {self.size}: one server with one block size wanted"
                )
            self.size = stored.size
        if self._next is not None and batch.number > self._next:
            self.lost.append((self._next, batch.number - 1))

    def _add(self, stored: Stored) -> None:
        parent = -1
        if stored.parent is not None:
            known = self._ids.get(stored.parent)
            if known is None:
                self.unknown += 1
                known = self._ids[stored.parent] = self._number(-1)
            parent = known
        tip = parent
        for at, name in enumerate(stored.hashes):
            known = self._ids.get(name)
            if known is None:
                known = self._ids[name] = self._number(tip)
            if self._tokens is not None and known not in self._tokens and stored.tokens:
                first = at * stored.size
                self._tokens[known] = array("I", stored.tokens[first : first + stored.size])
            tip = known
        self._gpu_blocks.update(stored.hashes)
        self.stored += len(stored.hashes)
        self._extend(parent, tip, len(stored.hashes), stored.session)

    def _number(self, parent: int) -> int:
        """Return the number of a new block."""
        number = len(self._run)
        if parent < 0 or parent != number - 1:
            self._start.append(number)
            self._parent.append(parent)
            self._depth.append(self._length(parent))
        self._run.append(len(self._start) - 1)
        return number

    def _extend(self, parent: int, tip: int, blocks: int, session: str | None) -> None:
        """Continue the open path that ends at the parent, or begin a path."""
        now = self.last
        path = self._open.get(parent) if parent >= 0 else None
        if path is not None:
            pause = now - path.last
            turn = blocks > 1 and pause > TURN_S
            if path.session == session and pause < PAUSE_S and not turn:
                del self._open[parent]
                path.last, path.tip = now, tip
                if blocks > 1:
                    path.prompt = tip
                self._open[tip] = path
                return
        path = _Path(now, now, tip, tip, session)
        self._paths.append(path)
        self._open[tip] = path
        if len(self._open) > self._open_limit:
            fresh = {at: one for at, one in self._open.items() if now - one.last < PAUSE_S}
            self._open, self._open_limit = fresh, 2 * len(fresh) + _FEW_OPEN

    def _length(self, block: int) -> int:
        """Return the number of blocks from the root to a block."""
        if block < 0:
            return 0
        run = self._run[block]
        return self._depth[run] + block - self._start[run] + 1

    def _blocks(self, tip: int) -> NDArray[np.uint32]:
        parts: list[NDArray[np.uint32]] = []
        for start, end in self._spans(tip):
            parts.append(np.arange(start, end, dtype=np.uint32))
        return np.concatenate(parts[::-1])

    def _spans(self, tip: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces of a path, last to first, as numbers `[start, end)`."""
        while tip >= 0:
            run = self._run[tip]
            yield self._start[run], tip + 1
            tip = self._parent[run]

    def _forget(self) -> None:
        """Drop the older half of the requests, and their blocks without a remaining request."""
        kept = self._paths[len(self._paths) // 2 :]
        self.forgotten += len(self._paths) - len(kept)
        used = np.zeros(len(self._run), dtype=bool)
        for path in kept:
            for start, end in self._spans(path.tip):
                used[start:end] = True
        moved = np.where(used, np.cumsum(used) - 1, -1)
        old = self._parents(np.flatnonzero(used))
        self._run, self._start = array("I"), array("q")
        self._parent, self._depth = array("q"), array("q")
        for parent in old:
            self._number(int(moved[parent]) if parent >= 0 else -1)
        self._ids = {name: int(moved[at]) for name, at in self._ids.items() if moved[at] >= 0}
        self._gpu_blocks.intersection_update(self._ids)
        if self._tokens is not None:
            kept_tokens = self._tokens.items()
            self._tokens = {int(moved[at]): one for at, one in kept_tokens if moved[at] >= 0}
        for path in kept:
            path.prompt, path.tip = int(moved[path.prompt]), int(moved[path.tip])
        self._paths = kept
        self._open = {path.tip: path for path in kept if self.last - path.last < PAUSE_S}

    def _parents(self, blocks: Iterable[int]) -> list[int]:
        found: list[int] = []
        for block in blocks:
            run = self._run[block]
            found.append(self._parent[run] if block == self._start[run] else int(block) - 1)
        return found
