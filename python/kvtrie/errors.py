"""Errors: the exceptions of kvtrie, from Python and from the core.

Invariant: a call that raises an error has changed nothing, and the message has the relevant
numbers. Cost: none until raised.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConfigError",
    "InvariantError",
    "KvtrieError",
    "NoMachineError",
    "NoSpaceError",
    "TransferError",
]


class KvtrieError(Exception):
    """Any error of kvtrie."""


class NoSpaceError(KvtrieError, MemoryError):
    """A tier lacks room for a request. Wait for moves, release leases, or request less.

    Args:
        message: the text, with the numbers in it.

    Attributes:
        tier: the tier's kind, e.g. "gpu".
        wanted: requested slots. All numbers are pages on a tier shared by groups of layers.
        free: slots free or evictable now.
        coming: slots to be freed by moves in flight.
        leased: slots held by leases.
    """

    def __init__(  # noqa: PLR0917 - positional, so that pickling works
        self, message: str, tier: str, wanted: int, free: int, coming: int, leased: int
    ) -> None:
        super().__init__(message, tier, wanted, free, coming, leased)
        self.tier = tier
        self.wanted = wanted
        self.free = free
        self.coming = coming
        self.leased = leased

    def __str__(self) -> str:
        return str(self.args[0])

    # Dask's pickling of exceptions would call `__new__` of a base, refused by two built-in bases.
    def __reduce__(self) -> tuple[type[NoSpaceError], tuple[object, ...]]:
        return type(self), self.args


class ConfigError(KvtrieError, ValueError):
    """A setting or an argument is wrong. The message says what is allowed."""


class InvariantError(KvtrieError, RuntimeError):
    """The manager found a broken invariant and refuses all further work: make a new manager."""


class ClosedError(KvtrieError, RuntimeError):
    """The manager is closed, or the lease is released or suspended."""


class NoMachineError(KvtrieError, RuntimeError):
    """No machine can take a request: none was added, or the last request of each machine failed."""


class TransferError(KvtrieError, OSError):
    """A transfer failed: a read, write or copy returned an error, or passed its deadline."""
