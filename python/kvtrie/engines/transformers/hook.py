"""Hooks of a model that keep no object alive, and methods that a compiled model calls as they are.

Invariant: a hook does nothing once its object is gone, and is removed then. Cost: a weak reference
per call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

__all__ = ["Life", "as_is", "weakly"]

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


class Life:
    """The hooks of an object before and after the passes of a module, until the object ends.

    Args:
        of: the object.
        module: whose passes.
        before: its method for a pre-hook.
        after: its method for a hook.
        release: called at the end; it must not refer to the object.
    """

    def __init__(
        self,
        of: object,
        module: torch.nn.Module,
        before: Callable[..., Any],
        after: Callable[..., Any],
        *,
        release: Callable[[], object],
    ) -> None:
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(weakly(before), with_kwargs=True),
            module.register_forward_hook(weakly(after), with_kwargs=True),
        ]
        # Neither refers to the object, so that one that is only dropped ends as well.
        self.end = weakref.finalize(of, _end, self._hooks, release)
        self.end.atexit = False

    @property
    def alive(self) -> bool:
        """Whether `end` has not been called, by anyone or as the object was collected."""
        return self.end.alive

    def leave(self) -> None:
        """End without a release: another object goes on with what this one holds."""
        self.end.detach()
        _end(self._hooks, lambda: None)


def _end(hooks: list[RemovableHandle], release: Callable[[], object]) -> None:
    for hook in hooks:
        hook.remove()
    release()
