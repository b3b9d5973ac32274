"""SchedulerConnector: the manager inside vLLM's scheduler, and every decision of the connector.

vLLM owns the first tier, and its blocks are the slots. The parts and their dependencies:

    Matching --+
    Admission -+-> Requests (waiting and running) --> ServedCache (manager, tiers, moves)
    Orders ----+-> Commits (blocks filled by steps) --^
    Reports ---+-> Loads (blocks read by steps) ------^

Invariant: only blocks complete and verified in host memory are reported to vLLM, and they are
pinned until the load. A reset empties the manager only after the last move is finished. Nothing
here waits.
Cost: a lookup per waiting request in steps after a change in the manager, else a comparison of
numbers. A comparison per running request and step, and a commit per request with full blocks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvtrie.engines.server.commands import CommandQueue
from kvtrie.engines.vllm.admission import Admission
from kvtrie.engines.vllm.cache import ServedCache
from kvtrie.engines.vllm.commits import Commits
from kvtrie.engines.vllm.loads import Loads
from kvtrie.engines.vllm.matching import Matching
from kvtrie.engines.vllm.misses import Misses
from kvtrie.engines.vllm.orders import Orders
from kvtrie.engines.vllm.reports import Reports
from kvtrie.engines.vllm.requests import Requests
from kvtrie.engines.vllm.versions import Versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie import BlockManager
    from kvtrie.engines.server.format_figure import FormatFigure
    from kvtrie.engines.server.why import MissCounter
    from kvtrie.engines.vllm.changes import Change, Naming
    from kvtrie.engines.vllm.messages import Opened, StepNews, StepOrders
    from kvtrie.engines.vllm.metrics import ExportedValues, MetricsExporter
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings

__all__ = ["SchedulerConnector"]

_NS = 1_000_000_000
_RESET = "the cache was reset"  # error of cancelled moves
_PAUSED = "vLLM paused before it was copied"


class SchedulerConnector:
    """The connector's scheduler side, with the arguments of `ServedCache`.

    Attributes:
        cache: the manager and the shared state.
        requests: the requests in progress.
        commands: an operator's commands for the next step.
        reports: the workers' reports.
        format_costs: the formats of lower tiers with their measured costs, the narrowest last.
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
        self.cache = ServedCache(settings, model, opened, naming=naming, clock=clock)
        self.requests = Requests(self.cache, settings.sharing.open())
        self.commands = CommandQueue()
        self.format_costs: tuple[FormatFigure, ...] = ()
        self._misses, self._loads = Misses(self.cache, settings), Loads(self.cache)
        self._commits = Commits(self.cache, self.requests)
        self._matching = Matching(self.cache, self.requests, settings)
        self._admission = Admission(
            self.cache, self.requests, self._commits, self._loads, self._misses
        )
        self._orders = Orders(self.cache, self.requests, self._commits, self._loads)
        self.reports = Reports(self.cache, self.requests, self._loads)
        self._versions = Versions(self.cache.manager, settings.keep_versions)
        self._cleared: list[Change] = []
        self._exported_at = 0

    @property
    def manager(self) -> BlockManager:
        """The manager."""
        return self.cache.manager

    @property
    def why(self) -> MissCounter | None:
        """Computed tokens by cause, or None if they are not counted."""
        return self._misses.why

    def close(self) -> None:
        """End the threads for comparing prompts and for queries to a shared store."""
        self._misses.close()
        self._matching.close()
        if self.cache.store is not None:
            self.cache.store.close()

    def match(self, request: Request, local: int) -> int | None:
        """Return as `Matching.match`, or 0 after an unexpected error.

        A burst of requests is matched and admitted over several steps.
        """
        if self.requests.crowded:
            return None
        with self.requests.contained(request.request_id):
            return self._matching.match(request, local)
        return 0

    def admit(self, request: Request, tables: list[list[int]], loaded: int) -> None:
        """Admit as `Admission.admit`. After an unexpected error no block counts as loaded."""
        with self.requests.contained(request.request_id):
            self._admission.admit(request, tables, loaded)
            return
        size, waiting = self.cache.size, self.requests.waiting.get(request.request_id)
        local = 0 if waiting is None else waiting.sequence.tokens(waiting.start)
        slots = tables[0][local // size : (local + loaded) // size]
        self._loads.fail(request.request_id, slots)

    def sources(self, request_id: str, loaded: int) -> tuple[int, int, int]:
        """Return the tokens of a hit from host memory, from disk, and from a shared store."""
        waiting = self.requests.waiting.get(request_id)
        return (loaded, 0, 0) if waiting is None else waiting.sources(loaded)

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Return the workers' orders for the step just scheduled by vLLM."""
        cache, now = self.cache, self.cache.clock()
        reset = self.commands.apply(cache.manager, cache.identity.weights, now, cache.native)
        due = cache.manager.next_due()
        if due is not None and due <= now:
            cache.manager.hint([], now=now)
        self._end_reset(now)
        self._versions.step(cache.identity.weights, now)
        made = self._orders.make(output, now)
        if reset:  # only after this step's promised loads were issued
            self.reset()
        cache.counters.line(now, None if self.why is None else self.why.line)
        return made

    def on_reports(self, news: Mapping[int, StepNews]) -> None:
        """Apply the workers' reports of a finished step. Its blocks are then due."""
        now = self.cache.clock()
        self.reports.take_in(news, now)
        self._end_reset(now)
        self._commits.finished(min([one.step for one in news.values()], default=-1))

    def end(self, request: Request) -> dict[str, Any] | None:
        """End a finished or failed request. vLLM frees its blocks now.

        Returns:
            Its miss report, if it asked for one.
        """
        return self._misses.answer(self.requests.end(request))

    @property
    def busy(self) -> bool:
        """Whether the connector needs further steps even if nothing is left to compute."""
        return bool(
            self.requests.leaving
            or self.cache.resetting
            or self._orders.forget
            or (any(self.cache.used.values()) and not self.requests.running)
            or self.cache.unverified.pending
            or self.cache.moves.dispatch.pending
            or len(self.commands)
        )

    def pause(self) -> bool:
        """Release vLLM's memory before vLLM overwrites or frees it. Returns True.

        Leases end, and copies of this memory not yet issued to a rank are cancelled. Issued copies
        finish before the memory is freed. Blocks on host and disk and published blocks stay. They
        match again once the workers have hashed their weights.
        """
        now = self.cache.clock()
        self.cache.identity.request_rehash()
        self.requests.reset(now)
        released = self._commits.release_leaving(now)
        self._commits.clear()
        self.cache.moves.cancel(released, now, _PAUSED)
        return True

    def reset(self) -> bool:
        """Forget all blocks, and match nothing from now on. Returns True.

        Copies not yet issued to a rank are cancelled. Until the last issued copy is finished, their
        slots stay in use, and requests neither match nor store.
        """
        now = self.cache.clock()
        self.cache.identity.request_rehash()
        self.requests.reset(now)
        self.cache.resetting = True
        self._cleared += [] if self.cache.published is None else self.cache.published.clear()
        self._end_reset(now)
        return True

    def _end_reset(self, now: int) -> None:
        """Cancel the moves not yet issued. Empty the manager once no move is in flight."""
        if not self.cache.resetting:
            return
        self._commits.release_leaving(now)
        self._commits.clear()
        self.cache.moves.cancel_all(now, _RESET)
        if self.cache.moves.dispatch.pending or self.cache.manager.stats().moves:
            return
        self.cache.clear()
        self._loads.clear()
        self._orders.forget = True

    def changes(self, *, forgotten: bool = False) -> list[Change]:
        """Return the blocks stored or removed on host or disk since the last call, in order.

        Args:
            forgotten: whether to publish all blocks again, because readers have forgotten them.
        """
        published = self.cache.published
        if published is None:
            return []
        cleared, self._cleared = self._cleared, []
        new = [*published.take(self.manager.take_events())]
        if published.weights != (weights := self.cache.identity.weights):
            new += published.change_weights(weights)
        if not self.cache.resetting:
            return [*cleared, *new, *(published.again() if forgotten else ())]
        for _ in published.clear():  # publish no block: the manager still has blocks to drop
            pass
        return cleared

    def counts(self, counts: MetricsExporter) -> ExportedValues | None:
        """Return the increase since the last export, or None if that was less than 1 s ago.

        A newly idle server exports at once, because its next step may be hours away.
        """
        cache, now = self.cache, self.cache.clock()
        if now - self._exported_at < _NS and (self.requests.running or self.busy):
            return None
        self._exported_at = now
        if cache.published is not None:
            cache.counters.lost["an event without a hash"] = cache.published.unknown
        waits = [one.wait for one in self.requests.waiting.values()]
        return counts.take(
            cache.manager.stats(),
            cache.counters,
            self.requests.pins.blocks,
            sum(wait.until > 0 and not wait.gave_up for wait in waits),
            self.why,
            kept=min(self.reports.kept_blocks.values(), default=0),
            figures=self.format_costs,
        )
