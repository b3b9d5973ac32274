"""Model hooks with weak references, and methods excluded from compiled graphs.

Invariant: a hook does nothing after its object is collected, and is then removed. Cost: a weak
reference per call.
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
    """Exclude a method from compiled graphs, so its lookups do not become part of a graph."""
    # torch.compiler.disable would import the compiler with this module.
    return vars(torch)["_disable_dynamo"](method)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method while its object is alive."""
    method_of = weakref.WeakMethod(method)

    @as_is
    def hook(*given: object) -> object:
        found = method_of()
        return None if found is None else found(*given)

    return hook


class Life:
    """Hooks of an object before and after the passes of a module, until the object ends.

    Args:
        of: the object.
        module: the module to hook.
        before: method of the object for a pre-hook.
        after: method of the object for a hook.
        release: called at the end. Must not refer to the object.
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
        # Neither refers to the object, so a dropped object is collected and ends as well.
        self.end = weakref.finalize(of, _end, self._hooks, release)
        self.end.atexit = False

    @property
    def alive(self) -> bool:
        """Whether `end` has not run yet. Garbage collection of the object also runs it."""
        return self.end.alive

    def leave(self) -> None:
        """Remove the hooks without a release, because a different object keeps the resources."""
        self.end.detach()
        _end(self._hooks, lambda: None)


def _end(hooks: list[RemovableHandle], release: Callable[[], object]) -> None:
    for hook in hooks:
        hook.remove()
    release()
