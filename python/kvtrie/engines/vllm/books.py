"""Books: the manager, its moves under way, and the tables of waiting and running requests.

Invariant: an exception that a request's content causes takes that request out of the cache, and no
other. Blocks are committed once finished steps have written them.
Cost: a comparison per running request and step, and a commit for each that has filled blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie import BlockManager, Index, Moves
from kvtrie.engines.server.boundary import Boundary, Contained
from kvtrie.engines.server.commands import CommandQueue
from kvtrie.engines.server.request_hints import RequestHints, read_hints
from kvtrie.engines.server.why import MissCounter
from kvtrie.engines.vllm.events import Change, Naming, PublishedBlocks
from kvtrie.engines.vllm.hints import envelope_hints, priority_hint, range_hints
from kvtrie.engines.vllm.identity import Identity
from kvtrie.engines.vllm.metrics import ConnectorCounters
from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.engines.vllm.proofs import Proofs
from kvtrie.engines.vllm.restored import (
    DISK,
    HOST,
    keys_with_images,
    load_indexes,
    on_every_rank,
    opened_tiers,
    root_key,
)
from kvtrie.engines.vllm.running import GrowingTokens, RunningRequest
from kvtrie.engines.vllm.scope import scope_of
from kvtrie.engines.vllm.store_client import StoreClient
from kvtrie.engines.vllm.store_moves import StoreMoves
from kvtrie.engines.vllm.waiting import WaitingRequest
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.transfer.dispatch import Dispatch
from kvtrie.transfer.used_blocks import UsedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from vllm.v1.request import Request

    from kvtrie.engines.server.format_figure import FormatFigure
    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.hint import Hint
    from kvtrie.settings.scope import Scope

__all__ = ["DISK", "HOST", "Books", "Planned"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows

_NS = 1_000_000_000
_MOST_EVENTS = 1 << 20  # between two steps; each takes memory only while it waits to be taken


@dataclass(slots=True)
class Planned:
    """A step in flight and the requests whose blocks it fills."""

    step: int
    rows: list[tuple[RunningRequest, int]]


class Books:
    """One manager and the tables of its requests.

    Args:
        settings: what the operator said.
        model: the KV that is served.
        opened: what the workers' tiers are, by rank.
        naming: vLLM's hashes of blocks, for events.
        clock: nanoseconds, monotone.

    Attributes:
        manager: the manager.
        dispatch: its moves that are under way.
        counters: the connector's counters.
        identity: the weights and adapters that requests compute with.
        proofs: blocks of an earlier server in host memory that are not proved yet.
        format_costs: the formats of lower tiers with their measured costs, the narrowest last.
        kept_blocks: by rank, blocks that the next server would find in kept host memory.
    """

    _exported_at: int
    _pinned: int
    _step: int
    _stored: int

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        opened: Mapping[int, Opened],
        *,
        naming: Naming | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._native = NativeFirst.of(settings, model)
        tiers = opened_tiers(settings, model, opened, self._native)
        self.identity = Identity(
            {rank: each.weights for rank, each in opened.items()}, model.blocks
        )
        self._size = model.block_tokens
        self._layers = model.shape.layers
        self._keep = max(1, settings.native_last)  # tokens of a prompt that are never loaded
        self._why_clients = settings.why_clients
        self._deadline_ns = int(settings.deadline_s * _NS)
        self._deep, self._clock = len(tiers) > DISK, clock
        at = {tier.kind: index for index, tier in enumerate(tiers)}
        self._disk, self._remote = at.get("disk"), at.get("remote")
        self.manager = BlockManager(
            model.shape,
            tiers,
            block_tokens=self._size,
            policy=settings.policy,
            objective=settings.objective,
            ranks=len(opened),
            events=_MOST_EVENTS if settings.events else 0,
            events_of="residency",
            explain=settings.why,
        )
        self.commands = CommandQueue()
        self.why = _miss_counter(self.manager, settings, self._native)
        found = [each.rows for each in opened.values() if each.rows is not None]
        kept = [each.kept_rows for each in opened.values() if each.kept_rows is not None]
        self._announced = None
        if settings.events:
            self._announced = PublishedBlocks(
                self._layers,
                naming,
                root_key(model),
                keys_with_images([*found, *kept]),
                last=HOST if self._disk is None else DISK,
            )
        self._cleared: list[Change] = []
        self.format_costs: tuple[FormatFigure, ...] = ()
        self.kept_blocks: dict[int, int] = {}
        self._lost_kept: dict[int, dict[str, int]] = {}
        self.dispatch = Dispatch(self.manager, len(opened))
        self._moves, self._store = (
            StoreMoves(self.dispatch, self._remote, (tiers[HOST].blocks or 0) // 2),
            StoreClient.of_server(settings, model, opened, clock),
        )
        self.counters = ConnectorCounters()
        self._boundary = Boundary("kvtrie", _LOG, clock)
        self._kept = tiers[HOST].keep is not None
        self._used = UsedBlocks(self.manager, self._disk)
        self._used_host = UsedBlocks(self.manager, HOST if self._kept else None)
        self._waiting: dict[str, WaitingRequest] = {}
        self._runs: dict[str, RunningRequest] = {}
        self._leaving: list[RunningRequest] = []
        self._planned: deque[Planned] = deque()
        self._to_commit: dict[
            RunningRequest, None
        ] = {}  # that have full blocks to commit, oldest first
        self._loads: dict[int, RunningRequest] = {}  # that have not been reported
        self._new_loads: dict[int, int] = {}  # of this step, and the slots they fill
        self._ready: list[Moves] = []  # for the next step
        self._expected: list[tuple[int, dict[int, bytes], list[int]]] = []  # by loads of this step
        self._lost: list[int] = []
        self._most_pinned = tiers[HOST].blocks or 0
        # Whether stores may still read blocks that vLLM has taken back since the last orders.
        self._forget = self._taken_back = False
        self._resetting = False  # a reset waits for copies to end
        self._committed: set[int] = set()
        # `_stored`: of those, with the step that filled them.
        self._stored, self._exported_at, self._pinned, self._step = 0, 0, 0, 0
        self.proofs = Proofs(self._restored(found, kept), len(opened))

    def close(self) -> None:
        """End the threads that compare prompts and ask a shared store."""
        if self.why is not None:
            self.why.close()
        if self._store is not None:
            self._store.close()

    def _restored(
        self, found: list[list[tuple[bytes, int]]], kept: list[list[tuple[bytes, int]]]
    ) -> Index:
        """Load what an earlier server left on disk and in host memory; the index of the latter."""
        left = {HOST: on_every_rank(kept, self._layers)} if self._kept else {}
        if self._disk is not None:
            left[DISK] = on_every_rank(found, self._layers)
        now = self._clock()
        load_indexes(self.manager, left, now)
        return self.manager.index(HOST, now=now) if self._kept else Index()

    def _waiting_request(self, request: Request) -> WaitingRequest:
        waiting = self._waiting.get(request.request_id)
        identity = self.identity.name(request)
        about = (identity, request.num_prompt_tokens)
        if waiting is not None and not waiting.shut and (waiting.identity, waiting.prompt) != about:
            # New weights, or a session's next input, which may have images.
            waiting.scope, (waiting.identity, waiting.prompt) = (
                self._scope_of(request, identity),
                about,
            )
            waiting.answer = None
            waiting.forget_store()
            self._unpin(waiting, self._clock())
        if waiting is None:
            given = read_hints(request.kv_transfer_params, request.session_id)
            scope = self._scope_of(request, identity)
            tokens = GrowingTokens(request, self._native)
            waiting = WaitingRequest(tokens, scope, about[1], identity, given.session, given.end)
            waiting.asked = given.why
            self._waiting[request.request_id] = waiting
            self._ignored(request, given.strange)
            if waiting.scope is not None:
                self._take_hints(waiting, request, given)
        return waiting

    def _scope_of(self, request: Request, identity: str | None) -> Scope | None:
        """The scope of a request; None, which neither matches nor stores, if none can be formed."""
        try:
            scope = scope_of(request, identity)
            return None if scope is None else self._native.scope(scope)
        except ConfigError as error:
            self.counters.lost["a scope that cannot be formed"] += 1
            self._boundary.ignored(request.request_id, str(error))
            return None

    def _ignored(self, request: Request, strange: Collection[str]) -> None:
        for why in strange:
            self._boundary.ignored(request.request_id, why)
        self.counters.lost["a hint that says nothing sensible"] += len(strange)

    def _contained(self, request_id: str) -> Contained:
        """Contain an exception that a request's content causes: it is not cached from then on."""
        return self._boundary.contained(request_id, lambda: self._abandon(request_id))

    def _abandon(self, request_id: str) -> None:
        """Serve a request without the cache from now on; its lease ends with the next orders."""
        self.counters.lost["an unexpected error"] += 1
        run = self._runs.get(request_id)
        if run is not None:
            run.stopped = True
            self._drop(request_id)
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.scope, waiting.answer, waiting.shut = None, None, True
            with suppress(KvtrieError):  # of a manager that is broken
                self._unpin(waiting, self._clock())

    def _take_hints(self, waiting: WaitingRequest, request: Request, given: RequestHints) -> None:
        tokens, hints = waiting.tokens.read(), list["Hint"]()
        strange: list[str] = []
        if request.priority:
            hints.append(priority_hint(request.priority, tokens, waiting.scope, waiting.session))
        if (envelope := getattr(request, "kv_hints", None)) is not None:  # from 0.31 on
            advice = envelope_hints(envelope, tokens, waiting.scope, waiting.session)
            hints += advice.hints
            waiting.ends |= advice.end
            strange += advice.strange
        hints += range_hints(given.ranges, tokens, waiting.scope, waiting.session)
        for hint in hints:
            try:
                self.manager.hint([self._native.hint(hint)], now=self._clock())
            except (KvtrieError, TypeError) as error:
                strange.append(str(error))
        self._ignored(request, strange)

    def _unpin(self, waiting: WaitingRequest, now: int) -> None:
        pins, waiting.pins = waiting.pins, []
        self._pinned, waiting.pinned = self._pinned - waiting.pinned, 0
        for pin in pins:
            self.manager.unpin_copies(pin, now=now)

    def _drop(self, request_id: str) -> RunningRequest | None:
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
            self._to_commit.pop(run, None)
            run.stopped = True
            self._note_use(run)
            released += run.lease.release(now=now).tolist()
        self._leaving = []
        self._taken_back |= bool(released)
        return released

    def _note_use(self, run: RunningRequest) -> None:
        """Note a use of a run's blocks, for tiers that the next server finds."""
        if self._deep:
            self._used.use(run.lease.handles)
        if self._kept:
            self._used_host.use(run.lease.handles)

    def _commit(self, run: RunningRequest, now: int) -> None:
        """Commit the full blocks that finished steps have written; the rest stays due."""
        if not self.identity.settled_for(run.request):
            return
        run.stopped |= run.identity != self.identity.name(run.request)
        upto = min(run.committable(), len(run.table) * self._size) // self._size * self._size
        if run.stopped:
            self._to_commit.pop(run, None)
        if run.stopped or upto < run.full or not run.lease.ready():
            return
        new = run.tokens.read()[run.lease.tokens : upto]
        first = run.lease.tokens // self._size
        committed = run.lease.commit(np.ascontiguousarray(new), now=now)
        self._learn(run, first)
        self._committed.update(committed.new.tolist())
        self._stored += committed.ahead
        shrink = self._native.shrink
        self.counters.blocks["written"] += (shrink(upto) - shrink(upto - len(new))) // self._size
        run.full = upto + self._size
        if run.written < run.full:
            self._to_commit.pop(run, None)

    def _learn(self, run: RunningRequest, first: int, *, only_missing: bool = False) -> None:
        """Note vLLM's hashes of a run's blocks, from one on, for events."""
        if self._announced is not None and (self._announced.nameless or not only_missing):
            handles = run.lease.handles[first:].tolist()
            self._announced.learn(run.request, handles, first, self._size)

    def _lose(self, table: list[int], local: int, end: int, why: str) -> None:
        """Have the workers report slots as not loaded: vLLM was promised them."""
        slots = table[local // self._size : end // self._size]
        self.counters.lost[why] += 1
        self._lost += slots


def _miss_counter(
    manager: BlockManager, settings: Settings, native: NativeFirst
) -> MissCounter | None:
    if not settings.why:
        return None
    return MissCounter(
        manager,
        min_tokens=settings.why_min_tokens,
        per_second=settings.why_per_second,
        place=native.shrink if native.tokens else None,
    )
