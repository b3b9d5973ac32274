"""Watch: detects calls in the scheduler's process with a possible change of weights or adapters.

vLLM does not notify connectors of `collective_rpc`, used by trainers to update and reload weights,
or of loaded and removed adapters. All these calls pass through its `EngineCore`. So these methods
of the class are wrapped once per process, and the wrapper calls the listeners after vLLM's method.
The listeners then make the workers hash their weights and adapters again.

`pauses` distinguishes a user's reset from a reset within vLLM's `pause`, `sleep` or
`release_kv_cache_memory`, which all pass through `EngineCore._reset_caches`.
Invariant: a listener is called before the next step is scheduled. Cost: a loop over listeners per
watched call, and nothing per step.
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
_PAUSING = "_reset_caches"  # only in versions of vLLM with a reset of connectors at a pause
_PAUSES = ContextVar("kvtrie_pauses", default=False)
_LISTENERS: WeakSet[Listener] = WeakSet()


class Listener(Protocol):
    """An object to notify of these calls."""

    def request_weights_rehash(self) -> None:
        """Handle a possible change of weights."""
        ...

    def request_adapters_rehash(self) -> None:
        """Handle a possibly loaded, replaced or removed adapter."""
        ...


def watch(listener: Listener) -> None:
    """Report calls to an object while it is alive."""
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
    """Return whether this thread resets caches because the engine pauses or sleeps."""
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
        finally:  # a failed call may have changed some workers
            for listener in list(_LISTENERS):
                if name in _OF_ADAPTERS:
                    listener.request_adapters_rehash()
                else:
                    listener.request_weights_rehash()

    vars(outer)["kvtrie_watches"] = True
    return outer
