"""Watch: learn in the scheduler's process of calls that may change weights or adapters.

vLLM notifies connectors neither of `collective_rpc`, by which trainers update and reload weights,
nor of adapters that are loaded and removed; both pass through its `EngineCore`. So these methods of
the class are wrapped, once per process, and the wrapper calls the listeners after vLLM's method.
Invariant: a listener is called before the next step is scheduled. Cost: a walk over listeners
per such call; steps are not touched.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.lora.request import LoRARequest

__all__ = ["WATCHED", "Listener", "watch"]

WATCHED = ("collective_rpc", "wake_up", "add_lora", "remove_lora")
_LISTENERS: WeakSet[Listener] = WeakSet()


class Listener(Protocol):
    """An object that wants to know."""

    def doubt_weights(self) -> None:
        """Weights may have changed."""
        ...

    def adapter_loaded(self, adapter: LoRARequest) -> None:
        """An adapter was read from its files."""
        ...

    def adapter_removed(self, ident: int) -> None:
        """An adapter was removed; its files are read again when it comes back."""
        ...


def watch(listener: Listener) -> None:
    """Report calls to an object as long as it lives."""
    from vllm.v1.engine.core import EngineCore

    for name in WATCHED:
        inner = getattr(EngineCore, name)
        if not hasattr(inner, "kvtrie_watches"):
            setattr(EngineCore, name, _watched(name, inner))
    _LISTENERS.add(listener)


def _watched(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own
        try:
            return inner(*args, **kwargs)
        finally:
            for listener in list(_LISTENERS):
                _report(listener, name, (*args[1:], *kwargs.values()))

    vars(outer)["kvtrie_watches"] = True
    return outer


def _report(listener: Listener, name: str, args: tuple[Any, ...]) -> None:
    if name == "add_lora":
        listener.adapter_loaded(args[0])
    elif name == "remove_lora":
        listener.adapter_removed(args[0])
    else:
        listener.doubt_weights()
