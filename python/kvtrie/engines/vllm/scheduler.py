"""SchedulerHalf: the manager inside vLLM's scheduler, and every decision of the connector.

vLLM owns the first tier; its blocks are the slots. The stores of blocks that a step will fill go
out with its orders and are carried out inside it. What it has written is committed when vLLM has
heard that it is finished; what could not be stored with it, for want of room, goes out with the
next step's orders, which the workers carry out before that step writes anything. So a slot that
vLLM has taken back, by an end, an abort or a preemption, is read before anybody can write it, and
never after. What could not go out by then is taken back.

Invariant: vLLM is promised blocks only that stand whole and proved in host memory, which nothing
between the promise and the load can change. Nothing here waits.
Cost: one lookup per waiting request and step in which the manager's books have changed, else a
comparison of numbers; a comparison per running request and step, and a commit for those that have
filled blocks.
One file beyond 600 lines: all decisions share the manager and the tables of waiting and running
requests.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtrie import BlockManager, Index, Moves
from kvtrie.engines.asked import Asked, asked_of
from kvtrie.engines.boundary import Boundary
from kvtrie.engines.vllm.announced import Announced, Change, Naming
from kvtrie.engines.vllm.envelope import advice_of
from kvtrie.engines.vllm.hints import hints_of, kept_by_rank
from kvtrie.engines.vllm.identity import Identity
from kvtrie.engines.vllm.known import Answer, Known, Promise
from kvtrie.engines.vllm.messages import StepOrders
from kvtrie.engines.vllm.run import GrowingTokens, Run
from kvtrie.engines.vllm.scope import scope_of
from kvtrie.engines.vllm.tally import Tally
from kvtrie.errors import ConfigError, KvtrieError, NoSpaceError
from kvtrie.hint import Prefetch, Release
from kvtrie.tier import Tier
from kvtrie.transfer.dispatch import Dispatch
from kvtrie.transfer.report import MoveReport
from kvtrie.transfer.used_blocks import UsedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie import MatchedBlock
    from kvtrie.engines.vllm.counts import Counts, Told
    from kvtrie.engines.vllm.messages import Opened, StepNews
    from kvtrie.engines.vllm.served import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.hint import Hint
    from kvtrie.scope import Scope

__all__ = ["SchedulerHalf"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows

_NS = 1_000_000_000
_MOST_EVENTS = 1 << 20  # between two steps; each takes memory only while it waits to be taken
_HOST, _DISK = 1, 2
_RESET = "the cache was reset"  # why moves are cancelled then
_THERE, _COMING, _DEEPER = "there", "coming", "deeper"


@dataclass(slots=True)
class _Planned:
    """What a step that is under way will have written, of the runs that fill blocks by it."""

    step: int
    rows: list[tuple[Run, int]]


class SchedulerHalf:
    """One manager and the books of its requests.

    Args:
        settings: what the operator said.
        model: the KV that is served.
        opened: what the workers' tiers are, by rank.
        naming: vLLM's hashes of blocks, for events.
        clock: nanoseconds, monotone.

    Attributes:
        manager: the manager.
        dispatch: its moves that are under way.
        tally: counters.
        identity: the weights and adapters that requests compute with.
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
        rooms = [min(each.rooms[at] for each in opened.values()) for at in range(_tiers(settings))]
        below = settings.tiers or (Tier("host", blocks=rooms[0]),)
        first = Tier("gpu", blocks=model.blocks, owner="engine", write="through")
        self.identity = Identity(
            {rank: each.weights for rank, each in opened.items()}, model.blocks
        )
        self._size = model.block_tokens
        self._layers = model.shape.layers
        self._deadline_ns = int(settings.deadline_s * _NS)
        self._deep = len(below) > 1
        self._clock = clock
        self.manager = BlockManager(
            model.shape,
            [first, *(_with_room(tier, room) for tier, room in zip(below, rooms, strict=True))],
            block_tokens=self._size,
            policy=settings.policy,
            objective=settings.objective,
            ranks=len(opened),
            events=_MOST_EVENTS if settings.events else 0,
            events_of="residency",
        )
        found = [each.rows for each in opened.values() if each.rows is not None]
        self._announced = None
        if settings.events:
            self._announced = Announced(self._layers, naming, _root(model), _with_images(found))
        self._cleared: list[Change] = []
        self._said = 0
        self.dispatch = Dispatch(self.manager, len(opened))
        self.tally = Tally()
        self._boundary = Boundary("kvtrie", _LOG, clock)
        self._used = UsedBlocks(self.manager, _DISK if self._deep else None)
        self._known: dict[str, Known] = {}
        self._runs: dict[str, Run] = {}
        self._leaving: list[Run] = []
        self._planned: deque[_Planned] = deque()
        self._due: dict[Run, None] = {}  # that have full blocks to commit, oldest first
        self._loads: dict[int, Run] = {}  # that have not been reported
        self._new_loads: dict[int, int] = {}  # of this step, and the slots they fill
        self._ready: list[Moves] = []  # for the next step
        self._lost: list[int] = []
        self._pinned = 0
        self._most_pinned = rooms[0]
        self._step = 0
        self._forget = False
        self._resetting = False  # a reset waits for copies to end
        self._committed: set[int] = set()
        self._stored = 0  # of those, with the step that filled them
        if self._deep:
            index = _on_every(found, self._layers)
            self.manager.load_index(index, _DISK, now=clock())

    # -------------------------------------------------------------- what vLLM asks before a step

    def match(self, request: Request, local: int) -> int | None:
        """Tokens behind vLLM's own hit that host memory has; None: ask again in the next step.

        Args:
            request: a request that waits.
            local: tokens that vLLM has itself, whole blocks.
        """
        with self._contained(request.request_id):
            return self._answer(request, local)
        return 0

    def _answer(self, request: Request, local: int) -> int | None:
        known, now, generation = self._know(request), self._clock(), self.manager.generation
        if known.scope is not None and not self.identity.known:
            known.promise = Promise(local, local)
            return None
        if self._resetting:
            known.promise = Promise(local, local)
            return 0
        if (answer := known.told(generation, local, now)) is not None:
            known.promise = answer.promise
            return answer.found
        found = self._match(known, local, now)
        # Who was asked to wait for what was asked for just now is answered anew: it may not come.
        sure = found is not None or known.coming
        known.answer = (
            Answer(generation, known.tokens.count(), known.promise, found) if sure else None
        )
        return found

    def _match(self, known: Known, local: int, now: int) -> int | None:
        known.promise, known.coming = Promise(local, local), False
        if known.scope is None:
            return 0
        tokens = known.tokens.read()
        match = self.manager.lookup(tokens, now=now, scope=known.scope, keep=1)
        if match.tokens <= local:
            return 0
        first, count = local // self._size, match.tokens // self._size
        host = match.standing(_HOST, skip=first)
        if first + host < count:
            states = [self._state(block) for block in match.blocks[first:]]
            if not known.waits_until:
                known.from_disk = (len(states) - host) * self._size if _DEEPER in states else 0
            self._pin(known, match.handles[first:], host, now)
            near = sum(any(copy.tier <= _HOST for copy in each.copies) for each in match.blocks)
            known.coming = _COMING in states
            if self._may_wait(known, host, near, now):
                return None
        elif not known.waits_until:
            known.from_disk = 0
        end = local + host * self._size
        known.promise = Promise(local, end)
        return end - local

    def _state(self, block: MatchedBlock) -> str:
        """Where a block of a match stands, as seen from host memory."""
        for copy in block.copies:
            if copy.tier == _HOST and not copy.leaving:
                whole = (copy.layer_lo, copy.layer_hi) == (0, self._layers)
                return _THERE if whole else _COMING
        return _DEEPER

    def _may_wait(self, known: Known, host: int, near: int, now: int) -> bool:
        """Have what lies deeper brought to host memory; whether the request is to wait for it.

        It waits no longer than the deadline, and not if nothing more can come.

        Args:
            known: the request.
            host: how many of its blocks stand in host memory, from the first on.
            near: how many stand there or above.
            now: the time.
        """
        if not self._deep and not known.coming:
            return False
        if not known.waits_until:
            known.waits_until = now + self._deadline_ns
        if now >= known.waits_until:
            self.tally.lost["disk too slow"] += 1
            return False
        if known.coming:
            return True
        if host <= known.asked:  # asked before, and no further: there is no room
            self.tally.lost["no room to bring up"] += 1
            known.waits_until = now
            return False
        tokens = known.tokens.read()
        asked = Prefetch(tokens=tokens, tier="host", scope=known.scope)
        (reply,) = self.manager.hint([asked], now=now)
        # So much may come for others that nothing may for this one: that ends by itself. Who was
        # given something and stands no further afterwards gives up: else requests would bring
        # blocks up in turns for ever, where memory is smaller than what they wait for.
        held_up = reply.code == "crowded" and reply.blocks <= near
        if not (held_up and self.manager.stats().moves):
            known.asked = host
        return True

    def _pin(self, known: Known, handles: NDArray[np.uint64], host: int, now: int) -> None:
        """Keep what has come to host memory until the rest has; who finds no room gives up."""
        if host > known.pinned and self._pinned + host - known.pinned <= self._most_pinned:
            new = handles[known.pinned : host]
            known.pins.append(self.manager.pin_copies(new, _HOST, now=now))
            self._pinned += len(new)
            known.pinned = host

    def _unpin(self, known: Known, now: int) -> None:
        pins, known.pins = known.pins, []
        self._pinned, known.pinned = self._pinned - known.pinned, 0
        for pin in pins:
            self.manager.unpin_copies(pin, now=now)

    def admit(self, request: Request, table: list[int], loaded: int) -> None:
        """Take note that vLLM has given blocks to a request.

        Args:
            request: the request.
            table: all of its blocks.
            loaded: tokens behind vLLM's own hit that it counts on us for.
        """
        with self._contained(request.request_id):
            self._admit(request, table, loaded)
            return
        known = self._known.get(request.request_id)
        local = known.promise.local if known is not None else 0
        self._lost += table[local // self._size : (local + loaded) // self._size]

    def _admit(self, request: Request, table: list[int], loaded: int) -> None:
        known, now = self._know(request), self._clock()
        unsure = self._turn(request, known)
        if known.scope is None or self._resetting:
            return
        local = known.promise.local
        own, new = table[: local // self._size], table[local // self._size :]
        if not self.identity.known or self.identity.reads_stale(request, own):
            self._unpin(known, now)
            self._lose(table, local, local + loaded, "blocks of other weights")
            return
        self.identity.written(new)
        end, tokens = local + loaded, known.tokens.read()
        self.tally.tokens["asked"] += len(tokens) - local
        try:
            lease = self.manager.acquire(
                tokens,
                now=now,
                scope=known.scope,
                session=known.session,
                keep=len(tokens) - end,
                load="none",
            )
        except (NoSpaceError, KvtrieError) as error:
            self._lose(table, local, end, f"{type(error).__name__} at admission")
            self._unpin(known, now)
            return
        full = lease.tokens + self._size
        about = known.prompt, known.identity
        run = Run(request, known.tokens, lease, list(table), self._step, *about, full)
        run.dead = unsure
        self._runs[request.request_id] = run
        self._unpin(known, now)
        if self._deep:
            self._used.use(lease.handles)
        self._learn(run, 0, only_missing=True)
        lease.bind(0, table)
        if not loaded:
            return
        first, last = local // self._size, end // self._size
        ids: list[int] = []
        if lease.matched >= end:
            try:
                ids = lease.load(blocks=(first, last), now=now).tolist()
            except KvtrieError as error:
                self.tally.lost[f"{type(error).__name__} at load"] += 1
        if len(ids) != last - first:
            self._lose(table, local, end, "a promise that did not hold")
            run.dead = True
        disk = min(known.from_disk, loaded)
        self.tally.tokens["disk"] += disk
        self.tally.tokens["host"] += loaded - disk
        for ident, slot in zip(ids, table[first:last], strict=False):
            run.loads.add(ident)
            self._loads[ident] = run
            self._new_loads[ident] = slot

    def _turn(self, request: Request, known: Known) -> bool:
        """End the run before this admission; whether rows that it left may be of other tokens."""
        last = self._drop(request.request_id)
        known.waits_until, known.asked = 0, -1
        if last is not None:
            last.written = last.committable()  # before vLLM counts what it schedules now
        if not (computed := request.num_computed_tokens):
            return False
        # A session's next input: vLLM asks for no match then.
        known.promise = Promise(computed, computed)
        # After a stop amid accepted drafts vLLM counts too many tokens as computed.
        return last is not None and (last.dead or last.drafted)

    def sources(self, request_id: str, loaded: int) -> tuple[int, int]:
        """Tokens of a hit that came from host memory, and from disk."""
        known = self._known.get(request_id)
        disk = min(known.from_disk, loaded) if known is not None else 0
        return loaded - disk, disk

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """What the workers do in the step that vLLM has just put together."""
        now = self._clock()
        self._extend(output)
        for ident in self._runs.keys() - output.num_scheduled_tokens.keys():
            if self._runs[ident].request.status.name == "PREEMPTED":
                self._drop(ident)
        released = self._let_go(now)
        for run in list(self._due):
            with self._contained(run.request.request_id):
                self._commit(run, now)
        self._end_reset(now)
        parts = [] if self._resetting else [*self._ready, *self.dispatch.take(now)]
        self._ready = []
        self._note_unstored(parts)
        late = self.dispatch.cancel(released, now, "vLLM took the block back before it was stored")
        if late:
            self.tally.lost["taken back before it was stored"] += late
        self._keep_promises(parts, now)
        ahead = self._store_ahead(self._plan(output), parts, now)
        made = StepOrders(
            self._step,
            [part.to_bytes() for part in parts],
            [part.to_bytes() for part in ahead],
            self._lost,
            self._forget,
            output.total_num_scheduled_tokens > 0,
            list(self._used.take(now, idle=not self._runs)) if self._used else [],
            self.identity.asked,
        )
        self._lost, self._forget = [], False
        self._step += 1
        self.tally.line(now)
        return made

    def _note_unstored(self, parts: list[Moves]) -> None:
        """Count the blocks committed for this step that no store takes to host memory."""
        if not self._committed:
            return
        under_way = (*parts, *self.dispatch.waiting())
        stores = (moves.block[moves.src == 0].tolist() for moves in under_way)
        left = len(self._committed.difference(*stores)) - self._stored
        if left > 0:
            self.tally.lost["no room on host"] += left
        self._committed, self._stored = set(), 0

    def _extend(self, output: SchedulerOutput) -> None:
        """Name the slots that running requests were given for this step."""
        cached = output.scheduled_cached_reqs
        for ident, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if not new or not new[0]:  # most steps give most requests none
                continue
            run = self._runs.get(ident)
            if run is None or run.begun == self._step:
                continue
            with self._contained(ident):
                run.lease.bind(len(run.table), new[0])
            run.table += new[0]
            if not run.dead:
                self.identity.written(new[0])

    def _plan(self, output: SchedulerOutput) -> list[tuple[Run, int]]:
        """Note which blocks this step will have filled, once it has finished."""
        rows: list[tuple[Run, int]] = []
        drafts = output.scheduled_spec_decode_tokens
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for ident, count in output.num_scheduled_tokens.items():
            if (run := self._runs.get(ident)) is not None:
                run.drafted = ident in drafts
                upto = before[ident] + count - len(drafts.get(ident, ()))
                if upto >= run.full:
                    rows.append((run, upto))
        if rows:
            self._planned.append(_Planned(self._step, rows))
        return rows

    def _store_ahead(
        self, rows: list[tuple[Run, int]], parts: list[Moves], now: int
    ) -> list[Moves]:
        """Begin the stores of blocks that this step will fill; what else goes out joins `parts`."""
        begun = False
        for run, upto in rows:
            first, last = run.lease.tokens // self._size, upto // self._size
            with self._contained(run.request.request_id):
                if run.dead or not self.identity.known:
                    run.lease.drop_ahead(now=now)
                elif first < (last := min(last, len(run.table))):
                    begun |= len(run.lease.store_ahead((first, last), now=now)) > 0
        ahead: list[Moves] = []
        for moves in self.dispatch.take(now) if begun else ():
            out: NDArray[np.bool_] = moves.src == 0
            if out.all():
                ahead.append(moves)
            else:  # what had to leave host memory for them
                ahead.append(moves[out])
                parts.append(moves[~out])
        return ahead

    def _keep_promises(self, parts: list[Moves], now: int) -> None:
        """Loads of this step that cannot go out with it will not be there when it reads them."""
        if not self._new_loads:
            return
        out = {ident for part in parts for ident in part.id.tolist()}
        late = self._new_loads.keys() - out
        for ident in late:
            self._loads.pop(ident).dead = True
            self._lost.append(self._new_loads[ident])
        if late:
            self.tally.lost["a load that had to wait"] += len(late)
            self.dispatch.cancel(late, now, "the step that reads it has begun")
        self._new_loads = {}

    # -------------------------------------------------------------- what vLLM tells after a step

    def hear(self, news: Mapping[int, StepNews]) -> None:
        """Take in what the workers tell of a step: how moves fared, and that it is finished."""
        now, failed = self._clock(), set[int]()
        for rank, one in news.items():
            if one.weights is not None:
                self.identity.hear(rank, *one.weights)
            if not one.reports:
                continue
            reports = MoveReport.from_bytes(one.reports)
            failed |= self.dispatch.tell(rank, reports, now)
            for report in reports if self._loads else ():
                if report.ok:
                    for ident in report.ids:
                        self._loads.pop(ident, None)
        if failed:
            self._give_up(failed & self._loads.keys())
        if any(one.reports for one in news.values()):  # which alone have the manager plan more
            self.manager.failed()
            if not self._resetting:
                self._ready += self.dispatch.take(now)  # so that `busy` knows of them
        self._end_reset(now)
        self._note_written(min((one.step for one in news.values()), default=-1))

    def _note_written(self, finished: int) -> None:
        """Blocks that steps up to one have filled are due."""
        while self._planned and self._planned[0].step <= finished:
            for run, upto in self._planned.popleft().rows:
                run.written = max(run.written, upto)
                if not run.dead:
                    self._due[run] = None

    def _give_up(self, loads: set[int]) -> None:
        """Commit nothing more of who reads a block whose load has failed."""
        broken = {slot for ident in loads for slot in self._loads[ident].table}
        for ident in loads:
            self.tally.lost["a load that failed"] += 1
            self._loads.pop(ident).dead = True
        if broken:  # whoever shares a block with it may have computed from what is not there
            for run in self._runs.values():
                run.dead |= not broken.isdisjoint(run.table)

    def end(self, request: Request) -> None:
        """Take note that a request has ended, well or not; vLLM frees its blocks now."""
        known, now = self._known.pop(request.request_id, None), self._clock()
        self._drop(request.request_id)
        with self._contained(request.request_id):
            if known is not None:
                self._unpin(known, now)
            if known is not None and known.session and known.ends:
                ended = Release(session=known.session, scope=known.scope)
                self.manager.hint([ended], now=now)

    @property
    def busy(self) -> bool:
        """Whether further steps are wanted although nothing may be left to compute."""
        return bool(
            self._leaving
            or self._resetting
            or self._forget
            or (self._used and not self._runs)
            or self.dispatch.pending
        )

    def reset(self) -> bool:
        """Forget all that is kept. Nothing matches from now on; returns True.

        Copies that no rank has are cancelled, those that ranks have are awaited: until the last one
        has ended their slots stay in use, and requests neither match nor store.
        """
        now = self._clock()
        self.identity.doubt()
        for known in self._known.values():
            self._unpin(known, now)
            known.answer, known.coming = None, False
            known.waits_until, known.asked, known.from_disk = 0, -1, 0
        for run in self._runs.values():
            run.dead = True
        self._leaving += self._runs.values()
        self._runs, self._resetting = {}, True
        self._cleared += [] if self._announced is None else self._announced.clear()
        self._end_reset(now)
        return True

    def _end_reset(self, now: int) -> None:
        """Cancel the moves that no rank has; empty the manager once none is under way."""
        if not self._resetting:
            return
        self._let_go(now)
        self._planned.clear()
        self._committed, self._stored = set(), 0
        self.dispatch.refuse([*self._ready, *self.dispatch.take(now)], now, _RESET)
        self._ready = []
        waiting = [int(one.id[0]) for one in self.dispatch.waiting()]
        self.dispatch.cancel(waiting, now, _RESET)
        if self.dispatch.pending or self.manager.stats().moves:
            return
        self.manager.reset()
        self._used = UsedBlocks(self.manager, _DISK if self._deep else None)
        self._loads, self._forget, self._resetting = {}, True, False

    def changes(self) -> list[Change]:
        """Blocks that have come whole to host or disk since the last call, or left, in order."""
        if self._announced is None:
            return []
        cleared, self._cleared = self._cleared, []
        if self._resetting:  # the manager still has the blocks; they are published as removed
            for _ in self._announced.take(self.manager.take_events()):
                pass
            for _ in self._announced.clear():
                pass
            return cleared
        return [*cleared, *self._announced.take(self.manager.take_events())]

    def counts(self, counts: Counts) -> Told | None:
        """What was counted since the last time; None if that was less than a second ago.

        A server that falls idle is told of at once: its next step may be hours away.
        """
        now = self._clock()
        if now - self._said < _NS and (self._runs or self.busy):
            return None
        self._said = now
        if self._announced is not None:
            self.tally.lost["an event without a hash"] = self._announced.unknown
        waiting = sum(known.waits_until > 0 for known in self._known.values())
        return counts.take(self.manager.stats(), self.tally, self._pinned, waiting)

    # ---------------------------------------------------------------------------- what runs hold

    def _know(self, request: Request) -> Known:
        known = self._known.get(request.request_id)
        identity = self.identity.name(request)
        about = (identity, request.num_prompt_tokens)
        if known is not None and not known.shut and (known.identity, known.prompt) != about:
            # New weights, or a session's next input, which may have images.
            known.scope, (known.identity, known.prompt) = self._scope_of(request, identity), about
            known.answer = None
            self._unpin(known, self._clock())
        if known is None:
            asked = asked_of(request.kv_transfer_params, request.session_id)
            scope = self._scope_of(request, identity)
            tokens = GrowingTokens(request)
            known = Known(tokens, scope, about[1], identity, asked.session, asked.end)
            self._known[request.request_id] = known
            self._ignored(request, asked.strange)
            if known.scope is not None:
                self._take_hints(known, request, asked)
        return known

    def _scope_of(self, request: Request, identity: str | None) -> Scope | None:
        """The scope of a request; None, which neither matches nor stores, if none can be formed."""
        try:
            return scope_of(request, identity)
        except ConfigError as error:
            self.tally.lost["a scope that cannot be formed"] += 1
            self._boundary.ignored(request.request_id, str(error))
            return None

    def _ignored(self, request: Request, strange: Collection[str]) -> None:
        for why in strange:
            self._boundary.ignored(request.request_id, why)
        self.tally.lost["a hint that says nothing sensible"] += len(strange)

    def _contained(self, request_id: str) -> AbstractContextManager[None]:
        """Contain an exception that a request's content causes: it is not cached from then on."""
        return self._boundary.contained(request_id, lambda: self._abandon(request_id))

    def _abandon(self, request_id: str) -> None:
        """Serve a request without the cache from now on; its lease ends with the next orders."""
        self.tally.lost["an unexpected error"] += 1
        run = self._runs.get(request_id)
        if run is not None:
            run.dead = True
            self._drop(request_id)
        known = self._known.get(request_id)
        if known is not None:
            known.scope, known.answer, known.shut = None, None, True
            with suppress(KvtrieError):  # of a manager that is broken
                self._unpin(known, self._clock())

    def _take_hints(self, known: Known, request: Request, asked: Asked) -> None:
        tokens, hints = known.tokens.read(), list["Hint"]()
        strange: list[str] = []
        if request.priority:
            hints.append(kept_by_rank(request.priority, tokens, known.scope, known.session))
        if request.kv_hints is not None:
            advice = advice_of(request.kv_hints, tokens, known.scope, known.session)
            hints += advice.hints
            known.ends |= advice.end
            strange += advice.strange
        hints += hints_of(asked.kept, tokens, known.scope, known.session)
        for hint in hints:
            try:
                self.manager.hint([hint], now=self._clock())
            except (KvtrieError, TypeError) as error:
                strange.append(str(error))
        self._ignored(request, strange)

    def _drop(self, request_id: str) -> Run | None:
        run = self._runs.pop(request_id, None)
        if run is not None:
            self._leaving.append(run)
        return run

    def _let_go(self, now: int) -> list[int]:
        """End the leases of runs that left; the moves that still use their slots."""
        released: list[int] = []
        for run in self._leaving:
            with self._boundary.contained(run.request.request_id):
                self._commit(run, now)
            self._due.pop(run, None)
            run.dead = True
            if self._deep:
                self._used.use(run.lease.handles)
            released += run.lease.release(now=now).tolist()
        self._leaving = []
        return released

    def _commit(self, run: Run, now: int) -> None:
        """Commit the full blocks that finished steps have written; the rest stays due."""
        if not self.identity.known:
            return
        run.dead |= run.identity != self.identity.name(run.request)
        upto = min(run.committable(), len(run.table) * self._size) // self._size * self._size
        if run.dead:
            self._due.pop(run, None)
        if run.dead or upto < run.full or not run.lease.ready():
            return
        new = run.tokens.read()[run.lease.tokens : upto]
        first = run.lease.tokens // self._size
        committed = run.lease.commit(np.ascontiguousarray(new), now=now)
        self._learn(run, first)
        self._committed.update(committed.new.tolist())
        self._stored += committed.ahead
        self.tally.blocks["written"] += len(new) // self._size
        run.full = upto + self._size
        if run.written < run.full:
            self._due.pop(run, None)

    def _learn(self, run: Run, first: int, *, only_missing: bool = False) -> None:
        """Note vLLM's hashes of a run's blocks, from one on, for events."""
        if self._announced is not None and (self._announced.nameless or not only_missing):
            handles = run.lease.handles[first:].tolist()
            self._announced.learn(run.request, handles, first, self._size)

    def _lose(self, table: list[int], local: int, end: int, why: str) -> None:
        """Have the workers report slots as not loaded: vLLM was promised them."""
        slots = table[local // self._size : end // self._size]
        self.tally.lost[why] += 1
        self._lost += slots


def _root(model: ServedModel) -> bytes:
    """The key before first blocks whose scope has no salt and no adapter."""
    size = model.block_tokens
    manager = BlockManager(
        model.shape, [Tier("host", blocks=1)], block_tokens=size, events=8, events_of="residency"
    )
    with manager.acquire(np.zeros(size, np.uint32), now=0) as lease:
        lease.reserve(size, now=0)
        lease.commit(np.zeros(size, np.uint32), now=0)
    return next(event.parent for event in manager.take_events() if event.parent is not None)


def _tiers(settings: Settings) -> int:
    return 1 if settings.tiers is None else len(settings.tiers)


def _on_every(ranks: list[list[tuple[bytes, int]]], layers: int) -> Index:
    """The blocks that the disks of all ranks have in the same slots; others are overwritten."""
    rows = [[(label, slot, 0, layers) for label, slot in each] for each in ranks]
    # Labels differ: each has its rank's own age.
    places = [list(zip(_keys(each), (row[1] for row in each), strict=True)) for each in rows]
    common = set(places[0]).intersection(*places[1:])
    return Index([row for row, at in zip(rows[0], places[0], strict=True) if at in common])


def _with_images(ranks: list[list[tuple[bytes, int]]]) -> set[bytes]:
    """Keys of the blocks on disk with images.

    A label has its record's number of digests at byte 36, or eight bytes later after a cost.
    """
    labels: set[bytes] = set()
    for label in (label for rows in ranks for label, _ in rows):
        at = 36 + 8 * label[25]
        if any(label[at : at + 4]):
            labels.add(label)
    return set(_keys([(label, at, 0, 1) for at, label in enumerate(labels)]))


def _keys(rows: list[tuple[bytes, int, int, int]]) -> list[bytes]:
    return [key.tobytes() for key in Index(rows).key]


def _with_room(tier: Tier, blocks: int) -> Tier:
    """The tier with its room in blocks, as the workers have it."""
    return replace(tier, blocks=blocks, bytes=None)
