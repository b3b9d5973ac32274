"""Requests: the waiting and the running requests of a server.

Invariant: an exception caused by a request's content excludes only this request from the cache.
Cost: a comparison per lookup, and reading each request's scope and hints once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvtrie.engines.server.request_hints import read_hints
from kvtrie.engines.server.tenant import tenant_of
from kvtrie.engines.vllm.hints import envelope_hints, priority_hint, range_hints
from kvtrie.engines.vllm.scope import scope_of
from kvtrie.engines.vllm.sequence import RequestSequence
from kvtrie.engines.vllm.waiting import StoreLookup, WaitingRequest
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.hint import Release
from kvtrie.transfer.prefetch import HostPins

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.request import Request

    from kvtrie.engines.server.boundary import Contained
    from kvtrie.engines.server.request_hints import RequestHints
    from kvtrie.engines.server.tenant import Sharing
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.running import RunningRequest
    from kvtrie.settings.hint import Hint
    from kvtrie.settings.scope import Scope

__all__ = ["Requests"]

# Work per step of matching and admitting prompts, in tokens: 12 prompts of 2,000 tokens, 3 to 5 ms.
_WORK_PER_STEP = 72_000
_PROMPT_WORK = 1000  # in addition to its tokens


class Requests:
    """The requests in progress of a server.

    Attributes:
        waiting: by id, the state of each unfinished request.
        running: by id, the requests with blocks.
        leaving: runs with leases to release with the next orders.
        pins: their pins in host memory. A request gives up if the quota is used up.
        spent: work of the prompts matched and admitted in this step.
    """

    def __init__(self, cache: ServedCache, sharing: Sharing | None = None) -> None:
        self._cache, self._sharing = cache, sharing
        self.waiting: dict[str, WaitingRequest] = {}
        self.running: dict[str, RunningRequest] = {}
        self.leaving: list[RunningRequest] = []
        self.spent = 0
        self.pins = HostPins(cache.manager, cache.host_blocks)

    def of(self, request: Request) -> WaitingRequest:
        """Return the state of a request, with the scope of its current input."""
        waiting = self.waiting.get(request.request_id)
        identity = self._cache.identity.name(request)
        about = (identity, request.num_prompt_tokens)
        if waiting is not None and not waiting.shut and (waiting.identity, waiting.prompt) != about:
            # New weights, or a session's next input, possibly with images.
            waiting.scope, (waiting.identity, waiting.prompt) = (
                self._scope_of(request, identity),
                about,
            )
            waiting.answer, waiting.store = None, StoreLookup()
            self.pins.end(waiting.pinned, self._cache.clock())
        if waiting is None:
            given = read_hints(request.kv_transfer_params, request.session_id)
            scope = self._scope_of(request, identity)
            sequence = RequestSequence(request, self._cache.native)
            waiting = WaitingRequest(sequence, scope, about[1], identity, given.session, given.end)
            waiting.asked = given.why
            self.waiting[request.request_id] = waiting
            self._ignored(request, given.ignored)
            if waiting.scope is not None:
                self._take_hints(waiting, request, given)
        return waiting

    @property
    def crowded(self) -> bool:
        """Whether the step's work is used up: further requests wait for the next step."""
        return self.spent >= _WORK_PER_STEP

    def spend(self, waiting: WaitingRequest) -> None:
        """Count the work of matching or admitting a prompt in this step."""
        self.spent += _PROMPT_WORK + waiting.sequence.known

    def _scope_of(self, request: Request, identity: str | None) -> Scope | None:
        """Return the scope of a request, or None: it then neither matches nor stores."""
        try:
            scope = scope_of(request, identity, self._sharing)
            sharing, params = self._sharing, request.kv_transfer_params
            if sharing is not None and tenant_of(params, sharing.secret) is None:
                self._cache.counters.lost["a request without a signed tenant"] += 1
            return None if scope is None else self._cache.native.scope(scope)
        except ConfigError as error:
            self._cache.counters.lost["a scope that cannot be formed"] += 1
            self._cache.boundary.ignored(request.request_id, str(error))
            return None

    def _ignored(self, request: Request, ignored: Collection[str]) -> None:
        for why in ignored:
            self._cache.boundary.ignored(request.request_id, why)
        self._cache.counters.lost["a hint that says nothing sensible"] += len(ignored)

    def _take_hints(self, waiting: WaitingRequest, request: Request, given: RequestHints) -> None:
        tokens, hints = waiting.sequence.read(), list["Hint"]()
        ignored: list[str] = []
        if request.priority:
            hints.append(priority_hint(request.priority, tokens, waiting.scope, waiting.session))
        if (envelope := getattr(request, "kv_hints", None)) is not None:  # from 0.31 on
            now = self._cache.clock()
            advice = envelope_hints(envelope, tokens, waiting.scope, waiting.session, now)
            hints += advice.hints
            waiting.ends |= advice.end
            ignored += advice.ignored
        hints += range_hints(given.ranges, tokens, waiting.scope, waiting.session)
        cache = self._cache
        for hint in hints:
            try:
                cache.manager.hint([cache.native.hint(hint)], now=cache.clock())
            except (KvtrieError, TypeError) as error:
                ignored.append(str(error))
        self._ignored(request, ignored)

    def contained(self, request_id: str) -> Contained:
        """Contain an exception caused by a request's content, and stop caching the request."""
        return self._cache.boundary.contained(request_id, lambda: self._abandon(request_id))

    def _abandon(self, request_id: str) -> None:
        """Serve a request without the cache from now on. Its lease ends with the next orders."""
        self._cache.counters.lost["an unexpected error"] += 1
        run = self.drop(request_id)
        if run is not None:
            run.stopped = True
        waiting = self.waiting.get(request_id)
        if waiting is not None:
            waiting.scope, waiting.answer, waiting.shut = None, None, True
            with suppress(KvtrieError):  # the manager may be broken
                self.pins.end(waiting.pinned, self._cache.clock())

    def drop(self, request_id: str) -> RunningRequest | None:
        """Release the lease of a request with the next orders. Return its run, or None."""
        run = self.running.pop(request_id, None)
        if run is not None:
            self.leaving.append(run)
        return run

    def end(self, request: Request) -> WaitingRequest | None:
        """Forget a finished request. Return its state, or None."""
        waiting, now = self.waiting.pop(request.request_id, None), self._cache.clock()
        self.drop(request.request_id)
        self._cache.identity.adapters.ended(request.request_id)
        with self.contained(request.request_id):
            if waiting is not None:
                self.pins.end(waiting.pinned, now)
            if waiting is not None and waiting.session and waiting.ends:
                ended = Release(session=waiting.session, scope=waiting.scope)
                self._cache.manager.hint([ended], now=now)
        return waiting

    def reset(self, now: int) -> None:
        """End all leases, and look up all waiting requests again."""
        for waiting in self.waiting.values():
            self.pins.end(waiting.pinned, now)
            waiting.answer = None
            waiting.from_disk = waiting.from_store = 0
            waiting.look_up_again()
        for run in self.running.values():
            run.stopped = True
        self.leaving += self.running.values()
        self.running = {}
