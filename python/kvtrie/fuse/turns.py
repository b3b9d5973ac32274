"""Turns: methods of an object that one thread at a time runs.

Invariant: a method that calls another one of the same object does not wait for itself. Cost: an
uncontended lock per call.
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
    """A method that holds its object's `lock`, an `RLock`, while it runs."""

    @wraps(method)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with cast("Any", args[0]).lock:
            return method(*args, **kwargs)

    return locked
