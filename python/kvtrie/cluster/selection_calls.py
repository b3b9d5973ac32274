"""SelectionCalls: the calls of Dynamo's selection service unrelated to a single request.

Invariant: an unexpected answer is a `CallError`. Cost: an HTTP call each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtrie.cluster.http_client import CallError
from kvtrie.cluster.index import Held
from kvtrie.cluster.json_answer import anything, field, items, natural

if TYPE_CHECKING:
    from kvtrie.cluster.registrations import Engine
    from kvtrie.cluster.service import Service

__all__ = ["Load", "SelectionCalls"]

_NOT_FOUND = 404
_TIERS = ("device_blocks", "host_pinned_blocks", "disk_blocks")
_LOADS = ("active_requests", "potential_prefill_tokens", "potential_decode_blocks")


class Load(NamedTuple):
    """Load reserved by requests in flight on a machine.

    Attributes:
        requests: requests.
        prefill_tokens: tokens of their prompts not computed yet.
        decode_blocks: blocks of their sequences.
    """

    requests: int
    prefill_tokens: int
    decode_blocks: int


class SelectionCalls:
    """The selection service's calls unrelated to a single request. Each raises `CallError`.

    Args:
        service: the service.
        model: the model's name there.
        block_tokens: tokens per block.
    """

    def __init__(self, service: Service, model: str, block_tokens: int) -> None:
        self._service, self._model, self._block_tokens = service, model, block_tokens

    def check(self, until: int) -> None:
        """Ask for loads, a call missing in the indexer."""
        self._service.ask("GET", "/loads", None, until, _check_loads)

    def registered(self, until: int) -> dict[int, str]:
        """Return the registered machines, with the endpoint of their events."""
        return self._service.ask("GET", "/workers", None, until, self._endpoints)

    def _endpoints(self, answer: object) -> dict[int, str]:
        rows = [row for row in items(answer) if field(row, "model_name") == self._model]
        return {
            natural(field(row, "worker_id")): str(field(row, "kv_events_endpoint")) for row in rows
        }

    def register(self, engine: Engine, until: int) -> None:
        """Register a machine, or change its endpoint."""
        body: dict[str, object] = {"worker_id": engine.machine, "model_name": self._model}
        body |= {"block_size": self._block_tokens, "kv_events_endpoint": engine.events}
        # The service returns this address with its choice and does not call it.
        body["endpoint"] = f"machine:{engine.machine}"
        if engine.replay is not None:
            body["replay_endpoint"] = engine.replay
        state = self._service.ask("POST", "/workers", body, until, _lifecycle)
        if state != "schedulable":
            self.end(engine.machine, until)
            raise CallError("refused", f"POST /workers: {state}")

    def end(self, machine: int, until: int) -> None:
        """End the registration of a machine, if it is registered."""
        try:
            self._service.ask("DELETE", f"/workers/{machine}", None, until, anything)
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise

    def overlaps(self, tokens: list[int], until: int) -> dict[int, Held]:
        """Return the blocks of a prompt on each machine."""
        body = {"token_ids": tokens, "model_name": self._model}
        most = len(tokens) // self._block_tokens

        def read(answer: object) -> dict[int, Held]:
            found: dict[int, Held] = {}
            for row in items(field(answer, "workers")):
                gpu, host, disk = (natural(field(row, tier), most) for tier in _TIERS)
                host = max(gpu, host)
                found[natural(field(row, "worker_id"))] = Held(gpu, host, max(host, disk))
            return found

        return self._service.ask("POST", "/overlap_scores", body, until, read)

    def loads(self, until: int) -> dict[int, Load]:
        """Return the load reserved by requests on each machine."""

        def read(answer: object) -> dict[int, Load]:
            mine = [row for row in items(answer) if field(row, "model_name") == self._model]
            rows = [row for one in mine for row in items(field(one, "loads"))]
            return {
                natural(field(row, "worker_id")): Load(*(natural(field(row, at)) for at in _LOADS))
                for row in rows
            }

        return self._service.ask("GET", "/loads", None, until, read)


def _check_loads(answer: object) -> None:
    for row in items(answer):
        field(row, "routing_group")
        items(field(row, "loads"))


def _lifecycle(answer: object) -> str:
    """Return the state of a worker at the service, with its reasons."""
    field(answer, "routing_group")
    state = str(field(answer, "lifecycle"))
    if state == "schedulable":
        return state
    return f"{state} {field(answer, 'not_schedulable_reasons')}"
