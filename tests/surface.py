"""Public methods, read off the classes, so that a test of all of them misses no new one."""

from __future__ import annotations

import inspect


def methods(kind):
    """The public methods of a class with their signatures; those of instances want `self`."""
    found = {}
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and callable(member):
            found[name] = inspect.signature(member)
    return found


def arguments(kind):
    """The names of what a class or a function is called with."""
    return [name for name in inspect.signature(kind).parameters if name != "self"]
