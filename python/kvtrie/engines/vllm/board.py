"""Board: digests of all ranks' weights, in memory shared by a server's processes.

vLLM's `OffloadingConnector` sends nothing from workers to secondary tiers in the scheduler's
process before the first request. Both sides already share this machine's memory for the chunks, so
the digests have a small file next to them. It has a counter of questions, and per rank the number
of the last answered question and the digest.
Invariant: `read` returns digests computed after the last question, or None. A worker writes its
digest before the number, so no partial digest is read. Cost: a read of memory per step.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["Board"]

_ROOT = Path("/dev/shm")  # noqa: S108 - vLLM's own region of chunks is there
_NUMBER = struct.Struct("<Q")
_DIGEST = 32
_RANK = _NUMBER.size + _DIGEST


class Board:
    """The digests of an engine.

    Args:
        engine: vLLM's name of the engine, unique on this machine.
        ranks: workers of the engine.
        root: the folder of the file.
    """

    def __init__(self, engine: str, ranks: int, root: Path = _ROOT) -> None:
        self._path, self._ranks = root / f"kvtrie_weights_{engine}", ranks
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = _NUMBER.size + ranks * _RANK
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
            self._place = os.fstat(file)
        finally:
            os.close(file)

    @property
    def question(self) -> int:
        """The number of the last question."""
        return _NUMBER.unpack_from(self._memory, 0)[0]

    def ask(self) -> None:
        """Ask all ranks. Only the scheduler's process calls this."""
        _NUMBER.pack_into(self._memory, 0, self.question + 1)

    def answer(self, rank: int, question: int, digest: bytes) -> None:
        """Answer a question for a rank."""
        at = _NUMBER.size + rank * _RANK
        self._memory[at + _NUMBER.size : at + _RANK] = digest
        _NUMBER.pack_into(self._memory, at, question + 1)

    def read(self) -> list[bytes] | None:
        """Return the digests of all ranks, or None until all have answered the last question."""
        wanted, digests = self.question + 1, list[bytes]()
        for at in range(_NUMBER.size, len(self._memory), _RANK):
            if _NUMBER.unpack_from(self._memory, at)[0] != wanted:
                return None
            digests.append(self._memory[at + _NUMBER.size : at + _RANK])
        return digests

    def close(self) -> None:
        """Remove the file unless a later engine has replaced it. Mappings stay valid."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), self._place):
                self._path.unlink()
