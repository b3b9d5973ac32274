"""Turns: methods of an object run by a single thread at a time.

Invariant: nested calls on the same object do not deadlock. Cost: an uncontended lock per call.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_turn"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_turn(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a method to hold its object's `lock`, an `RLock`, while it runs."""

    @wraps(method)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with cast("Any", args[0]).lock:
            return method(*args, **kwargs)

    return locked
