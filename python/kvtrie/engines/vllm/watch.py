"""Watch: learn in the scheduler's process of calls that may change weights or adapters.

`pauses` says whether the reset that a connector gets is a part of vLLM's `pause`, `sleep` or
`release_kv_cache_memory`, which all pass through `EngineCore._reset_caches`, or a user's.

vLLM notifies connectors neither of `collective_rpc`, by which trainers update and reload weights,
nor of adapters that are loaded and removed; both pass through its `EngineCore`. So these methods of
the class are wrapped, once per process, and the wrapper calls the listeners after vLLM's method,
which then have the workers name again what they hold.
Invariant: a listener is called before the next step is scheduled. Cost: a walk over listeners
per such call; steps are not touched.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WATCHED", "Listener", "pauses", "watch"]

WATCHED = ("collective_rpc", "wake_up", "add_lora", "remove_lora")
_OF_ADAPTERS = ("add_lora", "remove_lora")
_PAUSING = "_reset_caches"  # vLLM has it since it resets connectors at a pause
_PAUSES = ContextVar("kvtrie_pauses", default=False)
_LISTENERS: WeakSet[Listener] = WeakSet()


class Listener(Protocol):
    """An object that wants to know."""

    def doubt_weights(self) -> None:
        """Weights may have changed."""
        ...

    def doubt_adapters(self) -> None:
        """An adapter may have been loaded, replaced or removed."""
        ...


def watch(listener: Listener) -> None:
    """Report calls to an object as long as it lives."""
    from vllm.v1.engine.core import EngineCore

    for name in WATCHED:
        inner = getattr(EngineCore, name)
        if not hasattr(inner, "kvtrie_watches"):
            setattr(EngineCore, name, _watched(name, inner))
    inner = getattr(EngineCore, _PAUSING, None)
    if inner is not None and not hasattr(inner, "kvtrie_watches"):
        setattr(EngineCore, _PAUSING, _pausing(inner))
    _LISTENERS.add(listener)


def pauses() -> bool:
    """Whether vLLM resets its caches in this thread because the engine pauses or sleeps."""
    return _PAUSES.get()


def _pausing(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own
        before = _PAUSES.set(True)
        try:
            return inner(*args, **kwargs)
        finally:
            _PAUSES.reset(before)

    vars(outer)["kvtrie_watches"] = True
    return outer


def _watched(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own
        try:
            return inner(*args, **kwargs)
        finally:  # a call that fails may have changed something on some workers
            for listener in list(_LISTENERS):
                if name in _OF_ADAPTERS:
                    listener.doubt_adapters()
                else:
                    listener.doubt_weights()

    vars(outer)["kvtrie_watches"] = True
    return outer
