"""SchedulerConnector: the manager inside vLLM's scheduler, and every decision of the connector.

vLLM owns the first tier; its blocks are the slots. The stores of blocks that a step will fill go
out with its orders and are carried out inside it. Its blocks are committed when vLLM reports that
it is finished; stores that found no room go out with the next step's orders, which the workers
carry out before that step writes anything. So a slot that vLLM has taken back, by an end, an abort
or a preemption, is read before another request can write it, and never after. Stores that could not
go out by then are cancelled.

Invariant: only blocks that are complete and verified in host memory are reported to vLLM, and they
are pinned until the load. Nothing here waits.
Cost: one lookup per waiting request and step in which the manager's books have changed, else a
comparison of numbers; a comparison per running request and step, and a commit for those that have
filled blocks.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvtrie.engines.server.miss_report import client_report
from kvtrie.engines.server.why import Admitted
from kvtrie.engines.vllm.books import Planned
from kvtrie.engines.vllm.messages import StepOrders
from kvtrie.engines.vllm.reports import Reports
from kvtrie.engines.vllm.running import RunningRequest
from kvtrie.engines.vllm.store_moves import DROPPED
from kvtrie.engines.vllm.waiting import Promise, WaitingRequest
from kvtrie.errors import KvtrieError, NoSpaceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie import Index, Moves

__all__ = ["SchedulerConnector"]


class SchedulerConnector(Reports):
    """The connector's scheduler side: admissions and the orders of each step, over its tables."""

    def admit(self, request: Request, table: list[int], loaded: int) -> None:
        """Take note that vLLM has given blocks to a request.

        Args:
            request: the request.
            table: all of its blocks.
            loaded: tokens after vLLM's own hit that kvtrie loads.
        """
        with self._contained(request.request_id):
            self._admit(request, table, loaded)
            return
        waiting = self._waiting.get(request.request_id)
        local = self._native.shrink(waiting.promise.local) if waiting is not None else 0
        self._lost += table[local // self._size : (local + loaded) // self._size]

    def _admit(self, request: Request, table: list[int], loaded: int) -> None:
        waiting, now = self._waiting_request(request), self._clock()
        unsure = self._end_last_run(request, waiting)
        local, native = waiting.promise.local, self._native
        before = native.shrink(local)
        end = native.stretch(before + loaded)
        self._count_computed(request, waiting, end, now)
        if waiting.scope is None or self._resetting:
            return
        own, new = table[: before // self._size], table[before // self._size :]
        table = native.slots_of(table)
        if not self.identity.settled or self.identity.reads_stale(request, own):
            self._unpin(waiting, now)
            self._lose(table, local, end, "blocks of other weights")
            return
        self.identity.written(new)
        tokens = waiting.tokens.read()
        self.counters.tokens["asked"] += waiting.tokens.count() - before
        try:
            lease = self.manager.acquire(
                tokens,
                now=now,
                scope=waiting.scope,
                session=waiting.session,
                keep=len(tokens) - end,
                load="none",
            )
        except (NoSpaceError, KvtrieError) as error:
            self._lose(table, local, end, f"{type(error).__name__} at admission")
            self._unpin(waiting, now)
            return
        full = lease.tokens + self._size
        about = waiting.prompt, waiting.identity
        run = RunningRequest(request, waiting.tokens, lease, list(table), self._step, *about, full)
        run.stopped = unsure
        self._runs[request.request_id] = run
        self._unpin(waiting, now)
        self._note_use(run)
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
                self.counters.lost[f"{type(error).__name__} at load"] += 1
        if len(ids) != last - first:
            self._lose(table, local, end, "a promise that did not hold")
            run.stopped = True
        host, disk, store = self.sources(request.request_id, loaded)
        self.counters.tokens.update(host=host, disk=disk, remote=store)
        self._expect(request, table[first:last])
        for ident, slot in zip(ids, table[first:last], strict=False):
            run.loads.add(ident)
            self._loads[ident] = run
            self._new_loads[ident] = slot

    def _expect(self, request: Request, slots: list[int]) -> None:
        """Have the workers compare the adapter of loaded blocks with that of the step."""
        adapter = request.lora_request
        if adapter is not None:
            digests = self.identity.adapters.digests(adapter.lora_int_id)
            self._expected.append((adapter.lora_int_id, digests, slots))

    def _count_computed(
        self, request: Request, waiting: WaitingRequest, start: int, now: int
    ) -> None:
        """Count the prompt tokens that a request computes by cause, once each."""
        prompt, scope = self._native.stretch(waiting.prompt), waiting.scope
        unread = self._resetting or not self.identity.settled or request.skip_reading_prefix_cache
        if waiting.asked and waiting.why is None and self._why_clients:
            findable = (waiting.prompt - self._keep) // self._size * self._size
            findable = 0 if scope is None or unread else findable
            found = min(self._native.shrink(start), waiting.prompt)
            waiting.why = client_report(waiting.prompt, found, findable)
        if self.why is None:
            return
        start, waiting.counted = max(start, waiting.counted), max(prompt, waiting.counted)
        if scope is None or unread:
            self.why.uncached(max(0, waiting.prompt - self._native.shrink(start)))
            return
        tokens = waiting.tokens.read()[:prompt]
        compared = waiting.asked and self._why_clients
        named = request.request_id, tokens, scope, waiting.session, compared
        self.why.admitted(Admitted(*named), start, now)

    def _end_last_run(self, request: Request, waiting: WaitingRequest) -> bool:
        """End the run before this admission; whether rows that it left may be of other tokens."""
        last = self._drop(request.request_id)
        waiting.waits_until, waiting.prefetched, waiting.gave_up = 0, -1, False
        waiting.forget_store()
        if last is not None:
            last.written = last.committable()  # before vLLM counts what it schedules now
        if not (computed := self._native.stretch(request.num_computed_tokens)):
            return False
        # A session's next input: vLLM asks for no match then.
        waiting.promise = Promise(computed, computed)
        # After a stop amid accepted drafts vLLM counts too many tokens as computed.
        return last is not None and (last.stopped or last.drafted)

    def sources(self, request_id: str, loaded: int) -> tuple[int, int, int]:
        """Tokens of a hit that came from host memory, from disk, and from a shared store."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return loaded, 0, 0
        store = min(waiting.from_store, loaded)
        disk = min(waiting.from_disk, loaded - store)
        return loaded - store - disk, disk, store

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Return the workers' orders for the step that vLLM has just scheduled."""
        now = self._clock()
        self.commands.apply(self.manager, self.identity.weights, now, self._native)
        self._extend(output)
        scheduled = output.num_scheduled_tokens
        for ident in [ident for ident in self._runs if ident not in scheduled]:
            if self._runs[ident].request.status.name == "PREEMPTED":
                self._drop(ident)
        released = self._let_go(now)
        for run in list(self._to_commit):
            with self._contained(run.request.request_id):
                self._commit(run, now)
        self._end_reset(now)
        parts = [] if self._resetting else [*self._ready, *self._moves.take(now)]
        self._ready = []
        self._note_unstored(parts)
        late = self.dispatch.cancel(released, now, "vLLM took the block back before it was stored")
        if late:
            self.counters.lost["taken back before it was stored"] += late
        self._keep_promises(parts, now)
        ahead = self._store_ahead(self._plan(output), parts, now)
        give_up = self._moves.give_up()
        if dropped := self._moves.take_dropped():
            self.counters.lost[DROPPED] += dropped
        made = StepOrders(
            self._step,
            [part.to_bytes() for part in parts],
            [part.to_bytes() for part in ahead],
            self._lost,
            give_up,
            self._forget,
            output.total_num_scheduled_tokens > 0,
            _ages(self._used.take(now, idle=not self._runs)) if self._used else [],
            self.identity.question,
            self._taken_back,
            self.proofs.questions((*parts, *ahead)),
            _ages(self._used_host.take(now, idle=not self._runs)) if self._used_host else [],
            self.identity.adapters.question,
            self.identity.adapters.take_wanted(),
            self._expected,
        )
        self._lost, self._forget, self._taken_back, self._expected = [], False, False, []
        self._step += 1
        self.counters.line(now, None if self.why is None else self.why.line)
        return made

    def _note_unstored(self, parts: list[Moves]) -> None:
        """Count the blocks committed for this step that no store takes to host memory."""
        if not self._committed:
            return
        under_way = (*parts, *self.dispatch.waiting())
        stores = (moves.block[moves.src == 0].tolist() for moves in under_way)
        left = len(self._committed.difference(*stores)) - self._stored
        if left > 0:
            self.counters.lost["no room on host"] += left
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
            at = len(run.table)
            blocks = self._native.shrink(at * self._size) // self._size
            slots = self._native.slots_of(new[0], blocks)
            with self._contained(ident):
                run.lease.bind(at, slots)
            run.table += slots
            if not run.stopped and run.identity == self.identity.name(run.request):
                self.identity.written(new[0])

    def _plan(self, output: SchedulerOutput) -> list[tuple[RunningRequest, int]]:
        """Note which blocks this step will have filled, once it has finished."""
        rows: list[tuple[RunningRequest, int]] = []
        drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        cached, runs, stretch = output.scheduled_cached_reqs, self._runs, self._native.stretch
        rest = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        for ident, before in chain(rest, new):
            if (run := runs.get(ident)) is not None:
                run.drafted = ident in drafts
                upto = before + counts[ident]
                if run.drafted:
                    upto -= len(drafts[ident])
                upto = stretch(upto)
                if upto >= run.full:
                    rows.append((run, upto))
        if rows:
            self._planned.append(Planned(self._step, rows))
        return rows

    def _store_ahead(
        self, rows: list[tuple[RunningRequest, int]], parts: list[Moves], now: int
    ) -> list[Moves]:
        """Begin the stores of blocks that this step will fill; what else goes out joins `parts`."""
        begun = False
        for run, upto in rows:
            first, last = run.lease.tokens // self._size, upto // self._size
            with self._contained(run.request.request_id):
                if run.stopped or not self.identity.settled_for(run.request):
                    run.lease.drop_ahead(now=now)
                elif first < (last := min(last, len(run.table))):
                    begun |= len(run.lease.store_ahead((first, last), now=now)) > 0
        ahead: list[Moves] = []
        for moves in self._moves.take(now) if begun else ():
            out: NDArray[np.bool_] = moves.src == 0
            if out.all():
                ahead.append(moves)
            else:  # evictions from host memory that make room for them
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
            self._loads.pop(ident).stopped = True
            self._lost.append(self._new_loads[ident])
        if late:
            self.counters.lost["a load that had to wait"] += len(late)
            self.dispatch.cancel(late, now, "the step that reads it has begun")
        self._new_loads = {}


def _ages(index: Index) -> list[tuple[bytes, int, int, int]]:
    """Rows of an index without the number of their group."""
    return [row[:4] for row in index]
