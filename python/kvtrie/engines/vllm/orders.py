"""Orders: the moves issued to workers with a step, executed before or during the step.

Stores of blocks filled by a step are issued with its orders and executed during the step. The
blocks are committed when vLLM reports the step as finished. Stores without room are issued with the
next step's orders, and workers execute them before this step writes anything. So if vLLM takes a
slot back after an end, an abort or a preemption, the slot is read before a new request can write
it, and never after. Stores not issued by then are cancelled.
Cost: a comparison per running request and step, and array operations over the moves.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvtrie.engines.vllm.cache import DISK, HOST
from kvtrie.engines.vllm.messages import StepOrders
from kvtrie.engines.vllm.store_moves import DROPPED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvtrie import Moves
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.commits import Commits
    from kvtrie.engines.vllm.loads import Loads
    from kvtrie.engines.vllm.messages import IndexRow
    from kvtrie.engines.vllm.requests import Requests
    from kvtrie.engines.vllm.running import RunningRequest

__all__ = ["Orders"]


class Orders:
    """Builds the orders of each step.

    Attributes:
        forget: whether workers are to forget all blocks on lower tiers.
    """

    def __init__(
        self, cache: ServedCache, requests: Requests, commits: Commits, loads: Loads
    ) -> None:
        self._cache, self._requests = cache, requests
        self._commits, self._loads = commits, loads
        self.forget = False

    def make(self, output: SchedulerOutput, now: int) -> StepOrders:
        """Return the orders of the step just scheduled by vLLM."""
        cache, requests, moves = self._cache, self._requests, self._cache.moves
        requests.spent = 0
        scheduled = output.num_scheduled_tokens
        for ident in [ident for ident in requests.running if ident not in scheduled]:
            if requests.running[ident].request.status.name == "PREEMPTED":
                requests.drop(ident)
        self._extend(output)
        self._note_states(output)
        released = self._commits.release_leaving(now)
        self._commits.commit_due(now)
        parts = [] if cache.resetting else moves.take(now)
        self._commits.count_unstored(parts)
        why = "vLLM took the block back before it was stored"
        if late := moves.dispatch.cancel(released, now, why):
            cache.counters.lost["taken back before it was stored"] += late
        self._loads.require(parts, now)
        ahead = self._store_ahead(self._plan(output), parts, now)
        if dropped := moves.take_dropped():
            cache.counters.lost[DROPPED] += dropped
        lost, expected = self._loads.take()
        receive, unreceived = self._loads.take_received()
        computes = output.total_num_scheduled_tokens > 0
        weights, adapters = cache.identity.questions(computes=computes)
        made = StepOrders(
            cache.step,
            [part.to_bytes() for part in parts],
            [part.to_bytes() for part in ahead],
            lost,
            self.forget,
            computes,
            self._ages(DISK, now),
            weights,
            self._commits.taken_back,
            cache.unverified.questions((*parts, *ahead)),
            self._ages(HOST, now),
            adapters,
            cache.identity.adapters.take_wanted(),
            expected,
            receive,
            unreceived,
            cache.slots.of_moves((*parts, *ahead)),
        )
        self.forget = self._commits.taken_back = False
        cache.step += 1
        return made

    def _extend(self, output: SchedulerOutput) -> None:
        """Bind the slots newly allocated to running requests for this step."""
        cached, identity = output.scheduled_cached_reqs, self._cache.identity
        for ident, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if not new or not any(new):  # most steps give most requests none
                continue
            run = self._requests.running.get(ident)
            if run is None or run.admitted_step == self._cache.step:
                continue
            for at, group in enumerate(self._cache.groups):
                if group.state or not (given := new[group.number]):
                    continue
                with self._requests.contained(ident):
                    run.grow(at, given)
                if not run.stopped and run.identity == identity.name(run.request):
                    identity.written(given)

    def _note_states(self, output: SchedulerOutput) -> None:
        """Record the states written by this step at borders, in blocks kept by vLLM for now."""
        offered = getattr(output, "kv_connector_block_state", None)
        if offered is None:
            return
        cache = self._cache
        place = {group.number: at for at, group in enumerate(cache.groups) if group.state}
        for ident, states in offered.boundary_state_offloads.items() if place else ():
            run = self._requests.running.get(ident)
            if run is None:
                continue
            for number, slot, border in states:
                if number in place and border % cache.size == 0:
                    at = border // cache.size - 1
                    run.states.append((cache.step, place[number], at, slot))

    def _plan(self, output: SchedulerOutput) -> list[tuple[RunningRequest, int]]:
        """Record the blocks filled by this step once it is finished."""
        rows: list[tuple[RunningRequest, int]] = []
        native = self._cache.native
        drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        cached, runs = output.scheduled_cached_reqs, self._requests.running
        rest = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        for ident, before in chain(rest, new):
            if (run := runs.get(ident)) is not None:
                run.drafted = ident in drafts
                upto = before + counts[ident]
                if run.drafted:
                    upto -= len(drafts[ident])
                upto = native.stretch(upto)
                if upto >= run.full:
                    rows.append((run, upto))
        self._commits.plan(rows)
        return rows

    def _store_ahead(
        self, rows: list[tuple[RunningRequest, int]], parts: list[Moves], now: int
    ) -> list[Moves]:
        """Start stores of blocks filled by this step. Evictions for them are added to `parts`."""
        begun, size = False, self._cache.size
        for run, upto in rows:
            first, last = run.lease.tokens // size, upto // size
            with self._requests.contained(run.request.request_id):
                if run.stopped or not self._cache.identity.known_for(run.request):
                    run.lease.drop_ahead(now=now)
                elif first < (last := min(last, len(run.table))):
                    begun |= len(run.lease.store_ahead((first, last), now=now)) > 0
        ahead: list[Moves] = []
        for moves in self._cache.moves.take(now) if begun else ():
            out: NDArray[np.bool_] = moves.src == 0
            if out.all():
                ahead.append(moves)
            else:  # evictions from host memory to make room for them
                ahead.append(moves[out])
                parts.append(moves[~out])
        return ahead

    def _ages(self, tier: int, now: int) -> list[IndexRow]:
        """Return the blocks of a tier with ages to write."""
        used = self._cache.used.get(tier)
        return [*used.take(now, idle=not self._requests.running)] if used else []
