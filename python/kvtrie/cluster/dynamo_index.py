"""DynamoIndex: Dynamo's standalone indexer, `python -m dynamo.indexer`, over HTTP.

Its counts are cumulative tokens: the count of a lower tier continues the prefix of the tiers above.
Invariant: as `Index`. Cost: a `POST /query` per prompt, with the prompt's tokens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvtrie.cluster.arguments import deadline, prompt
from kvtrie.cluster.http_client import CallError
from kvtrie.cluster.index import Held
from kvtrie.cluster.json_answer import anything, entries, field, items, natural
from kvtrie.cluster.registrations import Engine, Registrations
from kvtrie.cluster.service import SETUP_S, Service, ServiceStats, seconds_from_now
from kvtrie.settings.argument import text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DynamoIndex"]

_CONFLICT, _NOT_FOUND = 409, 404
_MOST_BLOCK = 1 << 20


class DynamoIndex:
    """An `Index` over Dynamo's indexer, of version 1.6.

    Args:
        url: its address, as "http://10.0.0.1:8090".
        model: the model's name at the indexer.
        block_tokens: tokens per block, as the engines publish them.
        clock: nanoseconds of the circuit breaker, monotone.

    Raises:
        ConfigError: a bad argument, or a service with other answers than the indexer's. A service
            without an answer is a warning, and is called again with the next request.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "default",
        block_tokens: int = 16,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._model = text("model", model)
        self._block_tokens = whole("block_tokens", block_tokens, 1, _MOST_BLOCK)
        self._service = Service(url, clock)
        self._registry = _IndexRegistry(self._service, self._model, self._block_tokens)
        self._registrations = Registrations(self._service, self._registry)
        self._service.check("Dynamo's indexer", self._registry.check)

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine by `POST /register`; see `Index.add`.

        A machine registered with the same endpoint stays registered, with its blocks. A restarted
        vLLM engine begins its batches at number 0 again, and the indexer then ignores them:
        `remove` and `add` the machine.
        """
        engine = Engine.of(machine, events, replay)
        self._registrations.add(engine, seconds_from_now(SETUP_S))

    def remove(self, machine: int) -> None:
        """End a registration by `POST /unregister`; see `Index.remove`."""
        self._registrations.remove(machine, seconds_from_now(SETUP_S))

    def match(
        self, tokens: Sequence[int] | NDArray[np.integer[Any]], *, deadline_s: float
    ) -> dict[int, Held]:
        """Ask by `POST /query`; see `Index.match`."""
        sent = prompt(tokens)
        until = seconds_from_now(deadline(deadline_s))
        if not self._registrations:
            return {}
        body = {"token_ids": sent, "model_name": self._model}
        try:
            self._registrations.restore(until)
            found = self._service.ask("POST", "/query", body, until, self._held(len(sent)))
        except CallError as error:
            self._service.warn(error)
            if error.outcome == "refused":
                self._registrations.request_check()
            return {}
        return {machine: held for machine, held in found.items() if machine in self._registrations}

    def stats(self) -> ServiceStats:
        """Return the counters since the object was made."""
        return self._service.stats()

    def close(self) -> None:
        """Close the connections. Machines stay registered."""
        self._service.close()

    def _held(self, tokens: int) -> Callable[[Any], dict[int, Held]]:
        def read(answer: object) -> dict[int, Held]:
            found: dict[int, Held] = {}
            for machine, counts in entries(field(answer, "instances")):
                gpu, host, disk = (natural(field(counts, at), tokens) for at in _TIERS)
                host = max(gpu, host)
                blocks = [count // self._block_tokens for count in (gpu, host, max(host, disk))]
                found[machine] = Held(*blocks)
            return found

        return read


_TIERS = ("gpu", "cpu", "disk")


class _IndexRegistry:
    """The indexer's calls for registering machines."""

    def __init__(self, service: Service, model: str, block_tokens: int) -> None:
        self._service, self._model, self._block_tokens = service, model, block_tokens

    def check(self, until: int) -> None:
        """Query no tokens, for an answer unique to this version of the indexer."""
        body: dict[str, object] = {"token_ids": [], "model_name": self._model}
        try:
            self._service.ask(
                "POST", "/query", body, until, lambda found: field(found, "instances")
            )
        except CallError as error:
            # The answer while no machine of the model is registered.
            if "no indexer for model=" not in error.reason or "routing_group=" not in error.reason:
                raise

    def registered(self, until: int) -> dict[int, str]:
        return self._service.ask("GET", "/workers", None, until, self._endpoints)

    def _endpoints(self, answer: object) -> dict[int, str]:
        rows = [row for row in items(answer) if field(row, "model_name") == self._model]
        found: dict[int, str] = {}
        for row in rows:
            endpoints = dict(entries(field(row, "endpoints")))
            found[natural(field(row, "instance_id"))] = str(endpoints.get(0))
        return found

    def register(self, engine: Engine, until: int) -> None:
        body: dict[str, object] = {"instance_id": engine.machine, "model_name": self._model}
        body |= {"block_size": self._block_tokens, "endpoint": engine.events}
        if engine.replay is not None:
            body["replay_endpoint"] = engine.replay
        try:
            self._service.ask("POST", "/register", body, until, anything)
        except CallError as error:
            if error.status != _CONFLICT:
                raise
            known = self.registered(until).get(engine.machine)
            if known == engine.events:
                return
            if known is None:
                raise  # another block size
            self.end(engine.machine, until)
            self._service.ask("POST", "/register", body, until, anything)

    def end(self, machine: int, until: int) -> None:
        body = {"instance_id": machine, "model_name": self._model}
        try:
            self._service.ask("POST", "/unregister", body, until, anything)
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise
