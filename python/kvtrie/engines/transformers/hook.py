"""Hooks of a model that keep no object alive, and methods that a compiled model calls as they are.

Invariant: a hook does nothing once its object is gone. Cost: a weak reference per call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["as_is", "weakly"]

_F = TypeVar("_F", bound="Callable[..., Any]")


def as_is(method: _F) -> _F:
    """A method that a compiled model calls as it is: what it looks up is no part of a graph."""
    # torch.compiler.disable would import the compiler with this module.
    return vars(torch)["_disable_dynamo"](method)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method as long as its object lives."""
    method_of = weakref.WeakMethod(method)

    @as_is
    def hook(*given: object) -> object:
        found = method_of()
        return None if found is None else found(*given)

    return hook
