"""SharedMemory: memory shared by processes of a machine, without a name in any folder.

A process creates it and passes its address to its peers, and they open it. It needs no room in
`/dev/shm`, and is freed when the last process with a mapping has ended, even by a crash.
Invariant: opening an address gives the memory created there, or an error. Cost: pages are touched
once, by the creating process.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from typing import NamedTuple

import torch

from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import free_memory

__all__ = ["Address", "SharedMemory", "machine"]

_MARK = 32  # bytes after the memory, identifying it


class Address(NamedTuple):
    """Address of a process's shared memory.

    Attributes:
        process: its id.
        file: its file descriptor there.
        size: bytes.
        mark: random bytes stored after the memory.
    """

    process: int
    file: int
    size: int
    mark: bytes


class SharedMemory:
    """A mapping of shared memory.

    Attributes:
        address: the address for further processes, valid until the creator has closed it.
        bytes: the memory, uint8 `(size,)`, initially zeros.
    """

    def __init__(self, file: int, address: Address) -> None:
        self.address = address
        self._file: int | None = file
        mapped = mmap.mmap(file, address.size + _MARK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.bytes, self._mark = whole[: address.size], whole[address.size :]

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        """Create `size` bytes of shared memory.

        Raises:
            ConfigError: a size below 1, no room on the machine, or a system without anonymous
                shared files.
        """
        if size < 1:
            raise ConfigError(f"shared memory of {size} bytes, at least 1 wanted")
        if not hasattr(os, "memfd_create"):
            raise ConfigError("this system has no memory that processes share without a file")
        # Checked first: the kernel allocates pages until none is left, and then kills a process.
        if size > (free := free_memory()):
            raise ConfigError(f"no room for {size} bytes of shared memory: {free} are free")
        file = os.memfd_create("kvtrie", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, size + _MARK)
        except OSError as error:
            os.close(file)
            raise ConfigError(f"no room for {size} bytes of shared memory: {error}") from error
        made = cls(file, Address(os.getpid(), file, size, secrets.token_bytes(_MARK)))
        made._mark.copy_(torch.frombuffer(bytearray(made.address.mark), dtype=torch.uint8))
        return made

    @classmethod
    def open(cls, address: Address) -> SharedMemory:
        """Open memory created by any process of the machine.

        Raises:
            ConfigError: no memory at the address, or different memory.
        """
        what = f"shared memory {address.file} of process {address.process}"
        try:
            file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{what} cannot be opened: {error}") from error
        found = os.fstat(file).st_size
        if found != address.size + _MARK:
            os.close(file)
            raise ConfigError(f"{what} has {found} bytes, {address.size + _MARK} wanted")
        opened = cls(file, address)
        if opened._mark.numpy().tobytes() != address.mark:
            opened.close()
            raise ConfigError(
                f"{what} has the mark of different memory: its process has closed the file and "
                "reused the number, restart the server"
            )
        return opened

    def close(self) -> None:
        """Refuse further opens. The memory stays mapped while its tensor is used."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def machine() -> str:
    """Return the name of the machine or container, the scope of shared memory.

    Raises:
        ConfigError: a system without a name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:  # noqa: PTH123
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError as error:
        raise ConfigError(f"this system does not report which machine it is: {error}") from error
