"""DynamoSelector: Dynamo's selection service, `python -m dynamo.select_service`, over HTTP.

    pick ──POST /select_and_reserve──> prefilled ──POST …/prefill_complete──> done ──DELETE──>

Invariant: as `Selector`; a reservation is released as soon as the service answers after `done`, and
at most `_MOST_OWED` releases wait for it. Cost: one call per request before it is sent; `prefilled`
and `done` make one each, within the same deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from kvtrie.breaker import State  # noqa: TC001 - of a public dataclass
from kvtrie.cluster.arguments import deadline, prompt, request_name
from kvtrie.cluster.http_client import CallError
from kvtrie.cluster.json_answer import anything, field, items, natural
from kvtrie.cluster.machines import Machines
from kvtrie.cluster.registrations import Engine, Registrations
from kvtrie.cluster.service import SETUP_S, Service, seconds_from_now
from kvtrie.settings.argument import flag, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.cluster.machines import Candidates, Request

__all__ = ["DynamoSelector", "SelectorStats"]

_NOT_FOUND = 404
_MOST_BLOCK = 1 << 20
_MOST_OUTPUT = 2**32 - 1
_MOST_OWED = 8192
_OWED_PER_CALL = 8


@dataclass(frozen=True, slots=True)
class SelectorStats:
    """Counters of a selector since it was made.

    Attributes:
        picks: requests by how their machine was chosen: "selected" by the service, "probe", or by
            our own counts because the answer of the service was "late", "unreachable", "invalid",
            "refused" or not asked for ("open").
        unknown: calls of `prefilled` and `done` for a request that is not in flight.
        forgotten: requests that counted as ended, because more than 65 536 were in flight.
        unreleased: ends that were not reported to the service, because more than 8192 waited for
            it: it counts such requests until it restarts.
        requests: requests in flight by machine.
        calls: calls of the service by outcome, as `ServiceStats.calls`.
        breaker: state of the circuit breaker of all calls.
    """

    picks: dict[str, int]
    unknown: int
    forgotten: int
    unreleased: int
    requests: dict[int, int]
    calls: dict[str, int]
    breaker: State


class DynamoSelector:
    """A `Selector` over Dynamo's selection service, of version 1.6.

    Args:
        url: its address, as "http://10.0.0.1:8092".
        deadline_s: seconds for each call, above 0.
        model: the model's name at the service.
        block_tokens: tokens per block, as the engines publish them.
        clock: nanoseconds of circuit breakers, monotone.

    Raises:
        ConfigError: a bad argument, or a service that answers otherwise than the selection service.
            One that does not answer is a warning: it is asked again with the next call.
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
        registry = _SelectorRegistry(self._service, self._model, size)
        self._registrations = Registrations(self._service, registry)
        self._machines = Machines(clock)
        # Reservations have names that are unique among all clients of the service.
        self._prefix, self._numbers = secrets.token_hex(8), count()
        self._lock = threading.Lock()
        self._picks: Counter[str] = Counter()
        self._unknown = self._unreleased = 0
        self._owed: deque[tuple[str, str]] = deque()
        self._service.check("Dynamo's selection service", registry.check)

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine by `POST /workers`; see `Selector.add`.

        A machine that is registered with the same endpoint stays registered, with its blocks. The
        engine of vLLM begins its batches at number 0 when it restarts, and the service then ignores
        them: `remove` and `add` the machine.
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
                self._owe(oldest)
            body |= {"selection_id": name, "allowed_worker_ids": candidates.live}
            wanted, how = self._selected(request, candidates, body, until)
            machine = self._machines.choose(request, wanted, candidates)
        except BaseException:
            self._machines.drop(ident)
            self._owe(request)
            raise
        with self._lock:
            self._picks["probe" if candidates.probe else how] += 1
        return machine

    def prefilled(self, request_id: str) -> None:
        """Note it by `POST /reservations/…/prefill_complete`; see `Selector.prefilled`."""
        request = self._machines.find(request_name(request_id))
        if request is None:
            self._count_unknown()
        elif request.asked:
            self._owe(request, "POST", "/prefill_complete")
        self._pay()

    def done(self, request_id: str, *, failed: bool = False) -> None:
        """Note it by `DELETE /reservations/…`; see `Selector.done`."""
        ended = self._machines.end(request_name(request_id), failed=flag("failed", failed))
        if ended is None:
            self._count_unknown()
        else:
            self._owe(ended)
        self._pay()

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
        """Close the connections; machines stay registered."""
        self._service.close()

    def _selected(
        self, request: Request, candidates: Candidates, body: dict[str, Any], until: int
    ) -> tuple[int | None, str]:
        """The service's choice and "selected", or None and why there is none."""

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
                self._registrations.doubt()
            request.asked = request.asked and error.outcome != "open"
            return None, error.outcome

    def _count_unknown(self) -> None:
        with self._lock:
            self._unknown += 1

    def _owe(self, request: Request, method: str = "DELETE", call: str = "") -> None:
        if not request.asked:
            return
        with self._lock:
            if len(self._owed) >= _MOST_OWED:
                self._owed.popleft()
                self._unreleased += 1
            self._owed.append((method, f"/reservations/{request.name}{call}"))

    def _pay(self) -> None:
        """Report ends of prompts and of requests, the oldest first; some more than came now."""
        until = seconds_from_now(self._deadline_s)
        for _ in range(_OWED_PER_CALL):
            try:
                method, path = owed = self._owed.popleft()
            except IndexError:
                return
            try:
                self._service.ask(method, path, None, until, anything)
            except CallError as error:
                if error.outcome == "refused":  # such as after a restart of the service
                    continue
                self._service.warn(error)
                self._owed.appendleft(owed)
                return


class _SelectorRegistry:
    """The selection service's calls by which it learns of machines."""

    def __init__(self, service: Service, model: str, block_tokens: int) -> None:
        self._service, self._model, self._block_tokens = service, model, block_tokens

    def check(self, until: int) -> None:
        """Ask for loads, which the indexer does not have."""
        self._service.ask("GET", "/loads", None, until, _check_loads)

    def registered(self, until: int) -> dict[int, str]:
        return self._service.ask("GET", "/workers", None, until, self._endpoints)

    def _endpoints(self, answer: object) -> dict[int, str]:
        rows = [row for row in items(answer) if field(row, "model_name") == self._model]
        return {
            natural(field(row, "worker_id")): str(field(row, "kv_events_endpoint")) for row in rows
        }

    def register(self, engine: Engine, until: int) -> None:
        body: dict[str, object] = {"worker_id": engine.machine, "model_name": self._model}
        body |= {"block_size": self._block_tokens, "kv_events_endpoint": engine.events}
        # The service hands this address back with its choice; it does not call it.
        body["endpoint"] = f"machine:{engine.machine}"
        if engine.replay is not None:
            body["replay_endpoint"] = engine.replay
        state = self._service.ask("POST", "/workers", body, until, _lifecycle)
        if state != "schedulable":
            self.end(engine.machine, until)
            raise CallError("refused", f"POST /workers: {state}")

    def end(self, machine: int, until: int) -> None:
        try:
            self._service.ask("DELETE", f"/workers/{machine}", None, until, anything)
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise


def _check_loads(answer: object) -> None:
    for row in items(answer):
        field(row, "routing_group")
        items(field(row, "loads"))


def _lifecycle(answer: object) -> str:
    """The state of a worker as the service has it, with its reasons."""
    field(answer, "routing_group")
    state = str(field(answer, "lifecycle"))
    if state == "schedulable":
        return state
    return f"{state} {field(answer, 'not_schedulable_reasons')}"
