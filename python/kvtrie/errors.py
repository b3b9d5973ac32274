"""Errors: the exceptions of kvtrie, from Python and from the core alike.

Invariant: a call that raises one of these has changed nothing, and its message carries the
numbers that explain it. Cost: none until raised.
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
    """A tier cannot hold what was asked for; wait for moves, release leases, or ask for less.

    Args:
        message: the text, with the numbers in it.

    Attributes:
        tier: the tier's kind, e.g. "gpu".
        wanted: slots asked for; pages on a tier that groups of layers share, as all numbers.
        free: slots that are free or could be evicted now.
        coming: slots that moves in flight will give back.
        leased: slots that leases hold.
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

    # Dask's pickling of exceptions would call `__new__` of a base, which two built-in bases refuse.
    def __reduce__(self) -> tuple[type[NoSpaceError], tuple[object, ...]]:
        return type(self), self.args


class ConfigError(KvtrieError, ValueError):
    """A setting or an argument is wrong; the message says what was wanted instead."""


class InvariantError(KvtrieError, RuntimeError):
    """The manager found itself broken and refuses all further work: make a new one."""


class ClosedError(KvtrieError, RuntimeError):
    """The manager is closed, or the lease is released or suspended."""


class NoMachineError(KvtrieError, RuntimeError):
    """No machine can take a request: none was added, or the last request of each one failed."""


class TransferError(KvtrieError, OSError):
    """Bytes could not be moved: a read, write or copy failed, or passed its deadline."""
