"""HeldAdapters: the adapters loaded in a worker of vLLM, named by their tensors.

`RankIdentity` answers the scheduler's questions about adapters and weights.

vLLM reads an adapter's files on first use, on an explicit load, and again after an eviction. It
keeps the old adapter if a load fails. So the name is the digest of the tensors in vLLM's adapter
manager, and not of any file.
Invariant: `digests` names the adapters of the next step, unless this step loads an adapter.
Cost: a comparison per held adapter and step, and a pass over the tensors of a new adapter.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any
from weakref import ref

from kvtrie.engines.vllm.contents import contents_digest
from kvtrie.errors import ConfigError
from kvtrie.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from vllm.lora.request import LoRARequest

    from kvtrie.engines.vllm.messages import Expected, StepNews, StepOrders

__all__ = ["HeldAdapters", "RankIdentity"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_IDENTITY = ("id", "module_name")
"""Attributes naming the adapter, without effect on its output."""


class HeldAdapters:
    """The adapters of a worker.

    Args:
        models: the models of the worker. A model with adapters has vLLM's adapter manager.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        managers = [getattr(model, "lora_manager", None) for model in models]
        self._managers: list[Any] = [each for each in managers if each is not None]
        # Only at start: vLLM later freezes its objects, and the collector no longer lists them.
        self._loaders = _loaders(self._managers) if self._managers else []
        self._named: dict[int, tuple[list[ref[Any]], bytes]] = {}
        self._failed: set[int] = set()

    def digests(self) -> dict[int, bytes]:
        """Return the digest of each adapter by vLLM's number, or b"" if it cannot be loaded."""
        held: dict[int, list[Any]] = {}
        for manager in self._managers:
            for ident, adapter in manager.list_adapters().items():
                held.setdefault(ident, []).append(adapter)
        known, self._named = self._named, {}
        for ident, adapters in held.items():
            refs, name = known.get(ident, ([], b""))
            if [each() for each in refs] != adapters:
                refs, name = [ref(each) for each in adapters], _name(adapters)
            self._named[ident] = refs, name
        self._failed -= held.keys()
        return {ident: name for ident, (_, name) in self._named.items()} | dict.fromkeys(
            self._failed, b""
        )

    def forget(self) -> None:
        """Read all tensors again at the next call of `digests`: they may have changed."""
        self._named, self._failed = {}, set()

    def load(self, request: LoRARequest) -> None:
        """Load an adapter through vLLM's own loader for a waiting request."""
        self._failed.discard(request.lora_int_id)
        held = [request.lora_int_id in manager.list_adapters() for manager in self._managers]
        if held and all(held) and not request.load_inplace:
            return
        try:
            for loader in self._loaders:
                loader.add_adapter(request)
        except Exception as error:  # noqa: BLE001 - the step that needs it reports it
            name, why = (printable(str(each), in_ascii=True) for each in (request.lora_name, error))
            _LOG.warning("kvtrie: vLLM cannot load adapter %s: %s", name, why)
        if not any(request.lora_int_id in each.list_adapters() for each in self._managers):
            self._failed.add(request.lora_int_id)


class RankIdentity:
    """Answers of a rank about its weights and adapters.

    Args:
        rank: the rank.
        weights: returns the digest of the weights.
        adapters: the adapters, or None if its models take none.
    """

    def __init__(
        self, rank: int, weights: Callable[[], bytes], adapters: HeldAdapters | None
    ) -> None:
        self._rank, self.weights, self.adapters = rank, weights, adapters
        self._question, self._asked_adapters = 0, 0
        self._answer: tuple[int, bytes] | None = None
        self._reported: tuple[int, dict[int, bytes]] = 0, {}  # of adapters
        self._expected: list[Expected] = []

    def ask(self, orders: StepOrders) -> None:
        """Receive a step's questions, and load the adapters of waiting requests."""
        self._expected = orders.expected
        if orders.weights != self._question:
            self._question = orders.weights
            self._answer = self._question, self.weights()
        if self.adapters is None:
            return
        if orders.adapters != self._asked_adapters:
            self._asked_adapters = orders.adapters
            self.adapters.forget()
        for request in orders.load_adapters:
            self.adapters.load(request)

    def answer(self, news: StepNews) -> None:
        """Add the requested digest of the weights, and the adapters if they have changed."""
        news.weights, self._answer = self._answer, None
        if (now := (self._asked_adapters, self._held())) != self._reported:
            self._reported = news.adapters = now

    def of_others(self) -> list[tuple[list[int], str]]:
        """Return slots and requests of loads under a different adapter than the step's."""
        expected, self._expected = self._expected, []
        held = self._held() if expected else {}
        return [
            (slots, request)
            for ident, digests, slots, request in expected
            if held.get(ident) != digests.get(self._rank)
        ]

    def _held(self) -> dict[int, bytes]:
        return {} if self.adapters is None else self.adapters.digests()


def _name(adapters: list[Any]) -> bytes:
    """Return the digest of the adapters of a number, or b"" if a part cannot be hashed."""
    try:
        return contents_digest(adapters, without=_IDENTITY)[0]
    except ConfigError as error:
        _LOG.warning("kvtrie: an adapter has no name, its KV is neither found nor kept: %s", error)
        return b""


def _loaders(managers: list[Any]) -> list[Any]:
    """Return vLLM's loader objects of these adapter managers in this process."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    found = [each for each in gc.get_objects() if issubclass(type(each), WorkerLoRAManager)]
    wanted = {id(manager) for manager in managers}
    return [each for each in found if id(getattr(each, "_adapter_manager", None)) in wanted]
