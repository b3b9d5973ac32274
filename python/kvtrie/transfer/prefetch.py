"""Prefetch from a shared store: ask for the blocks after the local match, and bring them to host.

`Prefetcher` asks on other threads and marks the blocks that the store has, for an engine that never
waits. `BlockingPrefetcher` waits for the answer, and until the blocks are on their way.
Where groups of layers are kept apart, blocks of each group are asked for and marked by themselves,
those that the longest border needs of the store (`group_search.py`).
Invariant: no call returns after its deadline, whatever the store does. Only blocks are marked that
the store reported or this process wrote or read; one that then cannot be read is a failed load.
Cost: one hash per block of the prompt, and a question about those that no local tier has.
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
        asked: names that the store was asked for.
        found: blocks after the local match that the store has, of groups of layers that are kept
            apart those before the border that it resumes; they are marked, and on their way to host
            as far as there was time.
        refuted: blocks that were believed to be in the store and are not.
        late: names without an answer by the deadline.
    """

    asked: int
    found: int
    refuted: int
    late: int


class Prefetcher:
    """The questions of one manager to its shared store.

    Args:
        manager: the manager.
        find: returns which leading blocks of keys the store has, by a time of `monotonic_ns`; of
            groups of layers that are kept apart, in the first one.
        clock: nanoseconds, monotone.
        answers: returns what the store says of blocks of a group, each by itself: its arguments are
            the group, keys and a time of `monotonic_ns`. None for a model with one group.

    Raises:
        ConfigError: groups that are kept apart, without `answers`.
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
        """Ask for the full blocks of a prompt that no faster tier has, without a wait.

        Args:
            tokens: the prompt.
            scope: the scope of its blocks.
            deadline: when the question ends, nanoseconds of the clock.
            keep: tokens at the end whose block is not asked for.
        """
        manager, now = self._manager, self._clock()
        keys = manager.keys(tokens, scope=scope)
        path = np.asarray(tokens, dtype=np.uint32)
        keys = keys[: (len(path) - keep) // manager.block_tokens]
        path = path[: len(keys) * manager.block_tokens]
        if self._answers is None:
            local = near = self.near(manager.lookup(path, now=now, scope=scope, keep=0))
            search = None
        else:
            parts = manager.parts_above(path, self._tier, scope=scope)
            search = GroupSearch(manager, self._answers, keys, parts)
            near, local = search.near, search.local
        question = Question(path, scope, near, keys[near:], deadline, search=search)
        if local == len(keys):
            question.found = Found(0, 0, 0, 0)
            question.close()
        else:
            self._questions.ask(question, now)
        return question

    def near(self, match: Match) -> int:
        """Leading blocks of a match that a faster tier than the store has whole."""
        count = 0
        while count < len(match.handles):
            step = max(match.resident(tier, skip=count) for tier in range(self._tier))
            if not step:
                break
            count += step
        return count

    def take_in(self, question: Question) -> int:
        """Mark the blocks that the store has, and clear the mark of those that it has lost.

        Returns:
            The leading blocks of the prompt that are on a faster tier or marked.
        """
        found, near, path, search = question.found, question.near, question.path, question.search
        if found is None:
            return near
        upto = near + found.blocks if search is None else search.stored
        mark = partial(self._manager.mark, tier=self._tier, now=self._clock(), scope=question.scope)
        if found.refuted or (upto - near < len(question.keys) and not found.late):
            # A block to clear may be leased or on the move: then it stays, and its load fails.
            with suppress(ConfigError):
                mark(path, present=False, skip=upto)
        if search is not None:
            return self._mark_groups(question, search, mark)
        if found.blocks:
            # A local block left since the question, or leases fill the tier: none is marked.
            with suppress(ConfigError, NoSpaceError):
                mark(path[: upto * self._manager.block_tokens], present=True, skip=near)
                question.wanted = upto
                return upto
        return near

    def _mark_groups(
        self, question: Question, search: GroupSearch, mark: Callable[..., object]
    ) -> int:
        """Clear what the store lacks of each group, and mark what the longest border needs."""
        size, near, border = self._manager.block_tokens, question.near, search.border
        for group, first, end in search.lost():
            with suppress(ConfigError):  # as above
                mark(question.path[: end * size], present=False, group=group, skip=first)
        if border <= search.local:
            return near
        with suppress(ConfigError, NoSpaceError):  # as above
            if border > near:
                mark(question.path[: border * size], present=True, group=0, skip=near)
            for group, first, end in search.needed():
                mark(question.path[: end * size], present=True, group=group, skip=first)
            question.wanted = border
            return max(near, border)
        return near

    def close(self) -> None:
        """End the threads, each after its call."""
        self._questions.close()


class BlockingPrefetcher:
    """The prefetches of one executor.

    Args:
        manager: its manager, whose last tier is a shared store or not.
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
        """As `Executor.prefetch`."""
        with self._ledger.section:  # refuses a fork
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
        """Hint until all blocks are on their way to host, or the deadline.

        Only a quarter of host memory may be in flight, so the rest is asked for again while the
        prefix grows. Blocks that have come are pinned until then, or later ones would evict them.
        """
        hint = Prefetch(tokens=path, tier="host", scope=scope)  # with a deadline it would wait
        manager, ledger, most, prefix = self._manager, self._ledger, -1, PinnedPrefix()
        stats = manager.stats().tiers["host"]
        (host,) = (tier for tier in manager.tiers if tier.kind == "host")
        # Groups of layers share the bytes: slots are those that the first one may have.
        blocks = stats.slots if stats.groups else host.room(manager.model, manager.block_tokens)
        pins = HostPins(manager, 3 * blocks // 4)
        try:
            while True:
                with ledger.section:
                    if (now := self._clock()) >= deadline:
                        return
                    ledger.poll()
                    match = manager.lookup(path, now=now, scope=scope, keep=0)
                    if (near := prefetcher.near(match)) > most:
                        most = near
                        had = min(prefix.blocks, len(match.handles))
                        host = min(pins.most, had + match.resident("host", skip=had))
                        pins.extend(prefix, match.handles[:host], now)
                        (reply,) = manager.hint([hint], now=now)
                        ledger.poll()
                        if reply.code != "crowded" or ledger.on_call:
                            return
                    if not ledger.pending:
                        return
                    ticket = ledger.section.ticket((deadline - now) / _NS)
                ticket.wait()
        finally:
            pins.end(prefix, self._clock())

    def close(self) -> None:
        """End the threads that ask the store."""
        if self._prefetcher is not None:
            self._prefetcher.close()


@dataclass(slots=True)
class PinnedPrefix:
    """Leading blocks of a prompt that are pinned in host memory.

    Attributes:
        blocks: the number of them.
        pins: the manager's pins.
    """

    blocks: int = 0
    pins: list[int] = field(default_factory=list[int])


class HostPins:
    """Pins of a manager's blocks in host memory, up to a number of blocks.

    Attributes:
        most: that number.
        blocks: the number of pinned blocks.
    """

    def __init__(self, manager: BlockManager, most: int) -> None:
        self._manager, self.most, self.blocks = manager, most, 0

    def extend(self, prefix: PinnedPrefix, handles: NDArray[np.uint64], now: int) -> None:
        """Pin all further blocks of a prefix that host memory has whole, or none."""
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
