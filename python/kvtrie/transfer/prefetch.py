"""Prefetch: finds the blocks after the local match in a shared store and loads them to host.

`Prefetcher` queries the store on separate threads and marks the blocks found, for an engine that
never waits. `BlockingPrefetcher` waits for the answer, and until the loads are in flight. With
separate groups of layers, blocks are queried and marked per group, limited to the blocks needed by
the longest border (`group_search.py`).
Invariant: no call returns after its deadline, whatever the store does. Only blocks reported by the
store, or written or read by this process, are marked. A marked block that cannot be read is a
failed load.
Cost: a hash per block of the prompt, and a query for the blocks missing on all local tiers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.settings.argument import real
from kvtrie.settings.hint import Prefetch
from kvtrie.tiers import parts_of
from kvtrie.tiers.remote import Found
from kvtrie.transfer.group_search import GroupSearch
from kvtrie.transfer.store_question import Question, Questions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvtrie import BlockManager, Match, Scope
    from kvtrie.tiers.remote.search import Answer
    from kvtrie.transfer.ledger import Ledger

    _Tokens: TypeAlias = Sequence[int] | NDArray[np.integer] | Buffer

__all__ = ["BlockingPrefetcher", "HostPins", "PinnedPrefix", "Prefetched", "Prefetcher"]

_NS = 1_000_000_000
_MOST_S = 86_400.0


@runtime_checkable
class _Finds(Protocol):
    def find(self, keys: NDArray[np.uint8], deadline: int) -> Found: ...

    def answers(self, keys: NDArray[np.uint8], deadline: int) -> list[Answer]: ...


class Prefetched(NamedTuple):
    """Result of a prefetch, in blocks.

    Attributes:
        asked: names queried in the store.
        found: blocks of the store after the local match, with separate groups of layers up to the
            resumable border. They are marked, and their loads started as far as time allowed.
        refuted: blocks believed to be in the store but missing.
        late: names without an answer by the deadline.
    """

    asked: int
    found: int
    refuted: int
    late: int


class Prefetcher:
    """The queries of a manager to its shared store.

    Args:
        manager: the manager.
        find: returns the leading blocks of keys found in the store, up to a deadline of
            `monotonic_ns`. With separate groups of layers, it searches the first group.
        clock: nanoseconds, monotone.
        answers: returns the store's answer for each block of a group. Its arguments are the group,
            keys and a deadline of `monotonic_ns`. None for a model with a single group.

    Raises:
        ConfigError: the model has separate groups, and `answers` is missing.
    """

    def __init__(
        self,
        manager: BlockManager,
        find: Callable[[NDArray[np.uint8], int], Found],
        clock: Callable[[], int],
        answers: Callable[[int, NDArray[np.uint8], int], list[Answer]] | None = None,
    ) -> None:
        self._manager, self._clock = manager, clock
        self._tier = [tier.kind for tier in manager.tiers].index("remote")
        self._questions = Questions(find, clock)
        groups = len(manager.stats().tiers["remote"].groups)
        if groups > 1 and answers is None:
            raise ConfigError(f"{groups} groups of layers are kept apart: answers for each wanted")
        self._answers = answers if groups > 1 else None

    def ask(
        self, tokens: _Tokens, scope: Scope | None, deadline: int, *, keep: int = 0
    ) -> Question:
        """Query the full blocks of a prompt missing on faster tiers, without waiting.

        Args:
            tokens: the prompt.
            scope: the scope of its blocks.
            deadline: end of the query, nanoseconds of the clock.
            keep: tokens at the end, excluded with their block.
        """
        manager, now = self._manager, self._clock()
        keys = manager.keys(tokens, scope=scope)
        path = np.asarray(tokens, dtype=np.uint32)
        keys = keys[: (len(path) - keep) // manager.block_tokens]
        path = path[: len(keys) * manager.block_tokens]
        if self._answers is None:
            match = manager.lookup(path, now=now, scope=scope, keep=0)
            local = local_blocks = self.local_blocks(match)
            search = None
        else:
            parts = manager.parts_above(path, self._tier, scope=scope)
            search = GroupSearch(manager, self._answers, keys, parts)
            local_blocks, local = search.local_blocks, search.local
        question = Question(path, scope, local_blocks, keys[local_blocks:], deadline, search=search)
        if local == len(keys):
            question.found = Found(0, 0, 0, 0)
            question.close()
        else:
            self._questions.ask(question, now)
        return question

    def local_blocks(self, match: Match) -> int:
        """Return the number of leading blocks of a match complete on a tier above the store."""
        count = 0
        while count < len(match.handles):
            step = max(match.resident(tier, skip=count) for tier in range(self._tier))
            if not step:
                break
            count += step
        return count

    def take_in(self, question: Question) -> int:
        """Mark the blocks found in the store, and clear the marks of lost blocks.

        Returns:
            The number of leading blocks on a faster tier or marked.
        """
        found, local_blocks = question.found, question.local_blocks
        path, search = question.path, question.search
        if found is None:
            return local_blocks
        upto = local_blocks + found.blocks if search is None else search.stored
        mark = partial(self._manager.mark, tier=self._tier, now=self._clock(), scope=question.scope)
        if found.refuted or (upto - local_blocks < len(question.keys) and not found.late):
            # A leased or moving block cannot be cleared: it stays marked, and its load fails.
            with suppress(ConfigError):
                mark(path, present=False, skip=upto)
        if search is not None:
            return self._mark_groups(question, search, mark)
        if found.blocks:
            # If a local block left since the query, or leases fill the tier, none is marked.
            with suppress(ConfigError, NoSpaceError):
                mark(path[: upto * self._manager.block_tokens], present=True, skip=local_blocks)
                question.wanted = upto
                return upto
        return local_blocks

    def _mark_groups(
        self, question: Question, search: GroupSearch, mark: Callable[..., object]
    ) -> int:
        """Clear lost blocks of each group, and mark the blocks needed by the longest border."""
        size, border = self._manager.block_tokens, search.border
        local_blocks = question.local_blocks
        for group, first, end in search.lost():
            with suppress(ConfigError):  # as above
                mark(question.path[: end * size], present=False, group=group, skip=first)
        if border <= search.local:
            return local_blocks
        with suppress(ConfigError, NoSpaceError):  # as above
            if border > local_blocks:
                mark(question.path[: border * size], present=True, group=0, skip=local_blocks)
            for group, first, end in search.needed():
                mark(question.path[: end * size], present=True, group=group, skip=first)
            question.wanted = border
            return max(local_blocks, border)
        return local_blocks

    def close(self) -> None:
        """End each thread after its current call."""
        self._questions.close()


class BlockingPrefetcher:
    """The prefetches of an executor.

    Args:
        manager: its manager, with or without a shared store as last tier.
        ledger: the moves and storages of its runner.
    """

    def __init__(self, manager: BlockManager, ledger: Ledger) -> None:
        self._manager, self._ledger, self._clock = manager, ledger, ledger.clock
        self._prefetcher: Prefetcher | None = None
        kinds = [tier.kind for tier in manager.tiers]
        if "remote" in kinds and isinstance(store := ledger.pools[kinds.index("remote")], _Finds):
            parts = [part for part in parts_of(store) if isinstance(part, _Finds)]

            def answers(group: int, keys: NDArray[np.uint8], until: int) -> list[Answer]:
                return parts[group].answers(keys, until)

            self._prefetcher = Prefetcher(manager, store.find, ledger.clock, answers)

    def prefetch(self, tokens: _Tokens, scope: Scope | None, deadline_s: float) -> Prefetched:
        """Prefetch a prompt, as for `Executor.prefetch`."""
        with self._ledger.section:  # raises in a fork
            seconds = real("deadline_s", deadline_s, 0, _MOST_S)
        if not seconds:
            raise ConfigError("deadline_s is 0, above 0 wanted")
        prefetcher, deadline = self._prefetcher, self._clock() + int(seconds * _NS)
        if prefetcher is None:
            return Prefetched(0, 0, 0, 0)
        question = prefetcher.ask(tokens, scope, deadline)
        if (found := question.wait(self._clock)) is None:
            return Prefetched(len(question.keys), 0, 0, len(question.keys))
        prefetcher.take_in(question)
        if question.wanted:
            path = question.path[: question.wanted * self._manager.block_tokens]
            self._bring(prefetcher, path, scope, deadline)
        return Prefetched(found.queried, found.blocks, found.refuted, found.late)

    def _bring(
        self, prefetcher: Prefetcher, path: NDArray[np.uint32], scope: Scope | None, deadline: int
    ) -> None:
        """Hint until all blocks are in flight or in host memory, or until the deadline.

        Only a quarter of host memory may be in flight, so the rest is hinted again while the prefix
        grows. Loaded blocks are pinned until then, because later loads would evict them.
        """
        hint = Prefetch(tokens=path, tier="host", scope=scope)  # a deadline would make it wait
        manager, ledger, most, prefix = self._manager, self._ledger, -1, PinnedPrefix()
        stats = manager.stats().tiers["host"]
        (host,) = (tier for tier in manager.tiers if tier.kind == "host")
        # Groups of layers share the bytes: these are the possible slots of the first group.
        blocks = stats.slots if stats.groups else host.room(manager.model, manager.block_tokens)
        pins = HostPins(manager, 3 * blocks // 4)
        try:
            while True:
                with ledger.section:
                    if (now := self._clock()) >= deadline:
                        return
                    ledger.poll()
                    match = manager.lookup(path, now=now, scope=scope, keep=0)
                    if (local_blocks := prefetcher.local_blocks(match)) > most:
                        most = local_blocks
                        had = min(prefix.blocks, len(match.handles))
                        host = min(pins.most, had + match.resident("host", skip=had))
                        pins.extend(prefix, match.handles[:host], now)
                        (reply,) = manager.hint([hint], now=now)
                        ledger.poll()
                        if reply.code != "crowded" or ledger.inline:
                            return
                    if not ledger.pending:
                        return
                    ticket = ledger.section.ticket((deadline - now) / _NS)
                ticket.wait()
        finally:
            pins.end(prefix, self._clock())

    def close(self) -> None:
        """End the threads of the store queries."""
        if self._prefetcher is not None:
            self._prefetcher.close()


@dataclass(slots=True)
class PinnedPrefix:
    """Leading blocks of a prompt pinned in host memory.

    Attributes:
        blocks: number of blocks.
        pins: the manager's pins.
    """

    blocks: int = 0
    pins: list[int] = field(default_factory=list[int])


class HostPins:
    """Pins of a manager's blocks in host memory, up to a number of blocks.

    Attributes:
        most: maximum number of pinned blocks.
        blocks: number of pinned blocks.
    """

    def __init__(self, manager: BlockManager, most: int) -> None:
        self._manager, self.most, self.blocks = manager, most, 0

    def extend(self, prefix: PinnedPrefix, handles: NDArray[np.uint64], now: int) -> None:
        """Pin the further blocks of a prefix in host memory, all or none."""
        new = len(handles) - prefix.blocks
        if new > 0 and self.blocks + new <= self.most:
            pin = self._manager.pin_copies(handles[prefix.blocks :], "host", now=now)
            prefix.pins.append(pin)
            prefix.blocks, self.blocks = len(handles), self.blocks + new

    def end(self, prefix: PinnedPrefix, now: int) -> None:
        """Unpin the blocks of a prefix."""
        self.blocks -= prefix.blocks
        pins, prefix.blocks, prefix.pins = prefix.pins, 0, []
        for pin in pins:
            self._manager.unpin_copies(pin, now=now)
