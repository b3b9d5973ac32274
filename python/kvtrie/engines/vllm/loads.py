"""Loads: loads in flight into vLLM's memory, from admission until every rank has the blocks.

Invariant: a load that cannot be issued with the step reading its slot is reported as failed.
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
        self._runs: dict[int, RunningRequest] = {}  # of unreported loads
        self._new: dict[int, int] = {}  # loads of this step, and their slots
        self._lost: list[int] = []
        self._unreceived: set[str] = set()  # requests waiting for failed loads
        self._expected: list[Expected] = []  # by loads of this step
        self._receive: dict[str, list[int]] = {}  # loads by waiting request

    def add(self, run: RunningRequest, ids: Iterable[int], slots: list[int]) -> None:
        """Record the loads of a request and their slots.

        Workers compare the adapter of these blocks with the adapter of the step.
        """
        new = dict(zip(ids, slots, strict=False))
        self._new.update(new)
        self._runs.update(dict.fromkeys(new, run))
        adapter = run.request.lora_request
        if adapter is not None:
            digests = self._cache.identity.adapters.digests(adapter.lora_int_id)
            request_id = run.request.request_id
            self._expected.append((adapter.lora_int_id, digests, slots, request_id))

    def fail(self, request_id: str, slots: list[int], why: str = "") -> None:
        """Make the workers report promised slots as not loaded.

        With several groups they report the request, and vLLM computes nothing of it before.
        """
        if why:
            self._cache.counters.lost[why] += 1
        if len(self._cache.groups) == 1:
            self._lost += slots
        elif slots:
            self._unreceived.add(request_id)

    def reported(self, ids: Iterable[int], failed: set[int]) -> set[int]:
        """End loads reported by a rank.

        Args:
            ids: the moves carried out by the rank.
            failed: the moves with a failure.

        Returns:
            The slots of requests with a failed load. These requests are stopped.
        """
        late = failed & self._runs.keys()
        broken = {slot for ident in late for slot in self._runs[ident].table}
        for ident in late:
            self._cache.counters.lost["a load that failed"] += 1
            self._runs.pop(ident).stopped = True
        # An open load may still fail on a later rank.
        done = self._runs.keys() & set(ids) if self._runs else ()
        for ident in self._cache.moves.dispatch.ended(done):
            del self._runs[ident]
        return broken

    def require(self, parts: list[Moves], now: int) -> None:
        """Fail the loads that were not issued with this step: it reads their slots."""
        if not self._new:
            return
        out = {ident for part in parts for ident in part.id.tolist()}
        late = self._new.keys() - out
        for ident in late:
            run = self._runs.pop(ident)
            run.stopped = True
            self.fail(run.request.request_id, [self._new[ident]])
        if late:
            self._cache.counters.lost["a load that had to wait"] += len(late)
            self._cache.moves.dispatch.cancel(late, now, "the step that reads it has begun")
        for ident in self._new if len(self._cache.groups) > 1 else ():
            if (waits := self._runs.get(ident)) is not None:
                self._receive.setdefault(waits.request.request_id, []).append(ident)
        self._new = {}

    def take(self) -> tuple[list[int], list[Expected]]:
        """Return the slots that are not loaded, and the expected adapters of loaded slots."""
        lost, expected, self._lost, self._expected = self._lost, self._expected, [], []
        return lost, expected

    def take_received(self) -> tuple[dict[str, list[int]], set[str]]:
        """Return the loads of waiting requests, and the waiting requests with failed loads."""
        receive, unreceived, self._receive, self._unreceived = (
            self._receive,
            self._unreceived,
            {},
            set(),
        )
        return receive, unreceived

    def clear(self) -> None:
        """Forget all loads. None may be in flight."""
        self._runs.clear()
