"""DynamoSelector: Dynamo's selection service, `python -m dynamo.select_service`, over HTTP.

    pick ──POST /select_and_reserve──> prefilled ──POST …/prefill_complete──> done ──DELETE──>

Invariant: as `Selector`. A reservation is released as soon as the service answers after `done`, and
at most `_MOST_PENDING` releases wait for the service. Cost: a call per request before it is sent.
`prefilled` and `done` also make a call each, within the same deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from kvtrie.cluster.arguments import deadline, prompt, request_name
from kvtrie.cluster.http_client import CallError
from kvtrie.cluster.json_answer import anything, field, natural
from kvtrie.cluster.machines import Machines
from kvtrie.cluster.registrations import Engine, Registrations
from kvtrie.cluster.selection_calls import SelectionCalls
from kvtrie.cluster.selector_stats import SelectorStats
from kvtrie.cluster.service import SETUP_S, Service, seconds_from_now
from kvtrie.settings.argument import flag, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.cluster.index import Held
    from kvtrie.cluster.machines import Candidates, Request
    from kvtrie.cluster.selection_calls import Load

__all__ = ["DynamoSelector"]

_Row = TypeVar("_Row")
_MOST_BLOCK = 1 << 20
_MOST_OUTPUT = 2**32 - 1
_MOST_PENDING = 8192
_REPORTS_PER_CALL = 8


class DynamoSelector:
    """A `Selector` and an `Index` over Dynamo's selection service, of version 1.6.

    Args:
        url: its address, as "http://10.0.0.1:8092".
        deadline_s: seconds for each call, above 0.
        model: the model's name at the service.
        block_tokens: tokens per block, as the engines publish them.
        clock: nanoseconds of circuit breakers, monotone.

    Raises:
        ConfigError: a bad argument, or a service with other answers than the selection service's. A
            service without an answer is a warning, and is called again with the next request.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        model: str = "default",
        block_tokens: int = 16,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._deadline_s = deadline(deadline_s)
        self._model = text("model", model)
        self._service = Service(url, clock)
        size = whole("block_tokens", block_tokens, 1, _MOST_BLOCK)
        self._calls = SelectionCalls(self._service, self._model, size)
        self._registrations = Registrations(self._service, self._calls)
        self._machines = Machines(clock)
        # Reservations have unique names among all clients of the service.
        self._prefix, self._numbers = secrets.token_hex(8), count()
        self._lock = threading.Lock()
        self._picks: Counter[str] = Counter()
        self._unknown = self._unreleased = 0
        self._pending_reports: deque[tuple[str, str]] = deque()
        self._service.check("Dynamo's selection service", self._calls.check)

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine by `POST /workers`; see `Selector.add`.

        A machine registered with the same endpoint stays registered, with its blocks. A restarted
        vLLM engine begins its batches at number 0 again, and the service then ignores them:
        `remove` and `add` the machine.
        """
        engine = Engine.of(machine, events, replay)
        self._registrations.add(engine, seconds_from_now(SETUP_S))
        self._machines.add(engine.machine)

    def remove(self, machine: int) -> None:
        """End a registration by `DELETE /workers`; see `Selector.remove`."""
        number = self._registrations.known(machine)
        self._machines.remove(number)
        self._registrations.remove(number, seconds_from_now(SETUP_S))

    def pick(
        self,
        request_id: str,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        expected_output: int | None = None,
    ) -> int:
        """Choose by `POST /select_and_reserve`; see `Selector.pick`."""
        ident, sent = request_name(request_id), prompt(tokens)
        body: dict[str, Any] = {"token_ids": sent, "model_name": self._model}
        if expected_output is not None:
            output = whole("expected_output", expected_output, 0, _MOST_OUTPUT)
            body["expected_output_tokens"] = output
        until = seconds_from_now(self._deadline_s)
        name = f"{self._prefix}-{next(self._numbers)}"
        request, candidates, dropped = self._machines.begin(ident, name)
        try:
            for oldest in dropped:
                self._queue_report(oldest)
            body |= {"selection_id": name, "allowed_worker_ids": candidates.live}
            wanted, how = self._selected(request, candidates, body, until)
            machine = self._machines.choose(request, wanted, candidates)
        except BaseException:
            self._machines.drop(ident)
            self._queue_report(request)
            raise
        with self._lock:
            self._picks["probe" if candidates.probe else how] += 1
        return machine

    def prefilled(self, request_id: str) -> None:
        """Report it by `POST /reservations/…/prefill_complete`; see `Selector.prefilled`."""
        request = self._machines.find(request_name(request_id))
        if request is None:
            self._count_unknown()
        elif request.asked:
            self._queue_report(request, "POST", "/prefill_complete")
        self._send_reports()

    def done(self, request_id: str, *, failed: bool = False) -> None:
        """Report it by `DELETE /reservations/…`; see `Selector.done`."""
        ended = self._machines.end(request_name(request_id), failed=flag("failed", failed))
        if ended is None:
            self._count_unknown()
        else:
            self._queue_report(ended)
        self._send_reports()

    def match(
        self, tokens: Sequence[int] | NDArray[np.integer[Any]], *, deadline_s: float
    ) -> dict[int, Held]:
        """Ask for the blocks of each machine by `POST /overlap_scores`; see `Index.match`."""
        sent = prompt(tokens)
        until = seconds_from_now(deadline(deadline_s))
        return self._asked(lambda: self._calls.overlaps(sent, until), until)

    def loads(self, *, deadline_s: float) -> dict[int, Load]:
        """Return the load reserved by all clients' requests on each machine, by `GET /loads`.

        Args:
            deadline_s: seconds for the whole call, above 0.

        Returns:
            Loads by added machine. Empty without an answer in time.

        Raises:
            ConfigError: a bad argument.
        """
        until = seconds_from_now(deadline(deadline_s))
        return self._asked(lambda: self._calls.loads(until), until)

    def stats(self) -> SelectorStats:
        """Return the counters since the object was made."""
        service, requests = self._service.stats(), self._machines.requests()
        with self._lock:
            return SelectorStats(
                picks=dict(self._picks),
                unknown=self._unknown,
                forgotten=self._machines.forgotten,
                unreleased=self._unreleased,
                requests=requests,
                calls=service.calls,
                breaker=service.breaker,
            )

    def close(self) -> None:
        """Close the connections. Machines stay registered."""
        self._service.close()

    def _selected(
        self, request: Request, candidates: Candidates, body: dict[str, Any], until: int
    ) -> tuple[int | None, str]:
        """Return the service's choice and "selected", or None and the outcome of the call."""

        def read(answer: object) -> int:
            machine = natural(field(answer, "worker_id"))
            if field(answer, "selection_id") != request.name or machine not in candidates.live:
                raise ValueError(f"machine {machine}, one of {candidates.live} wanted")
            return machine

        try:
            self._registrations.restore(until)
            request.asked = True
            return self._service.ask("POST", "/select_and_reserve", body, until, read), "selected"
        except CallError as error:
            self._service.warn(error)
            if error.outcome == "refused":
                self._registrations.request_check()
            request.asked = request.asked and error.outcome != "open"
            return None, error.outcome

    def _asked(self, ask: Callable[[], dict[int, _Row]], until: int) -> dict[int, _Row]:
        """Return the rows of the added machines; empty without an answer."""
        if not self._registrations:
            return {}
        try:
            self._registrations.restore(until)
            found = ask()
        except CallError as error:
            self._service.warn(error)
            if error.outcome == "refused":
                self._registrations.request_check()
            return {}
        return {machine: row for machine, row in found.items() if machine in self._registrations}

    def _count_unknown(self) -> None:
        with self._lock:
            self._unknown += 1

    def _queue_report(self, request: Request, method: str = "DELETE", call: str = "") -> None:
        if not request.asked:
            return
        with self._lock:
            if len(self._pending_reports) >= _MOST_PENDING:
                self._pending_reports.popleft()
                self._unreleased += 1
            self._pending_reports.append((method, f"/reservations/{request.name}{call}"))

    def _send_reports(self) -> None:
        """Report ended prompts and requests, oldest first, a few more than each call adds."""
        until = seconds_from_now(self._deadline_s)
        for _ in range(_REPORTS_PER_CALL):
            try:
                method, path = report = self._pending_reports.popleft()
            except IndexError:
                return
            try:
                self._service.ask(method, path, None, until, anything)
            except CallError as error:
                if error.outcome == "refused":  # for example after a restart of the service
                    continue
                self._service.warn(error)
                self._pending_reports.appendleft(report)
                return
