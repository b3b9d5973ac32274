"""Loads: blocks on their way into vLLM's memory, from admission until every rank has them.

Invariant: a slot whose load cannot go out with the step that reads it is reported as not loaded.
Cost: an entry per load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie import Moves
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.messages import Expected
    from kvtrie.engines.vllm.running import RunningRequest

__all__ = ["Loads"]


class Loads:
    """The loads of admitted requests."""

    def __init__(self, cache: ServedCache) -> None:
        self._cache = cache
        self._runs: dict[int, RunningRequest] = {}  # of loads that have not been reported
        self._new: dict[int, int] = {}  # of this step, and the slots they fill
        self._lost: list[int] = []
        self._unreceived: set[str] = set()  # requests that wait for loads which do not come
        self._expected: list[Expected] = []  # by loads of this step
        self._receive: dict[str, list[int]] = {}  # by request that waits for them

    def add(self, run: RunningRequest, ids: Iterable[int], slots: list[int]) -> None:
        """Note the loads of a request and the slots that they fill.

        Workers compare the adapter of these blocks with that of the step.
        """
        for ident, slot in zip(ids, slots, strict=False):
            self._runs[ident] = run
            self._new[ident] = slot
        adapter = run.request.lora_request
        if adapter is not None:
            digests = self._cache.identity.adapters.digests(adapter.lora_int_id)
            request_id = run.request.request_id
            self._expected.append((adapter.lora_int_id, digests, slots, request_id))

    def lose(self, request_id: str, slots: list[int], why: str = "") -> None:
        """Have the workers report slots as not loaded: vLLM was promised them.

        With several groups they report the request, which computes nothing before.
        """
        if why:
            self._cache.counters.lost[why] += 1
        if len(self._cache.groups) == 1:
            self._lost += slots
        elif slots:
            self._unreceived.add(request_id)

    def reported(self, ids: Iterable[int], failed: set[int]) -> set[int]:
        """End loads of which a rank has reported something.

        Args:
            ids: the moves that the rank has carried out.
            failed: those that have failed.

        Returns:
            The slots of requests that read a block whose load has failed; they are stopped.
        """
        late = failed & self._runs.keys()
        broken = {slot for ident in late for slot in self._runs[ident].table}
        for ident in late:
            self._cache.counters.lost["a load that failed"] += 1
            self._runs.pop(ident).stopped = True
        for ident in ids if self._runs else ():
            # One that is open may still fail on another rank.
            if ident in self._runs and not self._cache.moves.dispatch.is_open(ident):
                del self._runs[ident]
        return broken

    def require(self, parts: list[Moves], now: int) -> None:
        """Lose the loads of this step that do not go out with it: it would read before them."""
        if not self._new:
            return
        out = {ident for part in parts for ident in part.id.tolist()}
        late = self._new.keys() - out
        for ident in late:
            run = self._runs.pop(ident)
            run.stopped = True
            self.lose(run.request.request_id, [self._new[ident]])
        if late:
            self._cache.counters.lost["a load that had to wait"] += len(late)
            self._cache.moves.dispatch.cancel(late, now, "the step that reads it has begun")
        for ident in self._new if len(self._cache.groups) > 1 else ():
            if (waits := self._runs.get(ident)) is not None:
                self._receive.setdefault(waits.request.request_id, []).append(ident)
        self._new = {}

    def take(self) -> tuple[list[int], list[Expected]]:
        """Return the slots that are not loaded, and the adapters of those that are."""
        lost, expected, self._lost, self._expected = self._lost, self._expected, [], []
        return lost, expected

    def take_received(self) -> tuple[dict[str, list[int]], set[str]]:
        """Return the loads of requests that wait for them, and requests that wait in vain."""
        receive, unreceived, self._receive, self._unreceived = (
            self._receive,
            self._unreceived,
            {},
            set(),
        )
        return receive, unreceived

    def clear(self) -> None:
        """Forget all loads: none is under way."""
        self._runs.clear()
