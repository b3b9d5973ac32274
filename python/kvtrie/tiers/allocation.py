"""Allocates device or host memory for pools and returns it to the system.

Invariant: allocations start on a page and never exceed the available memory.
Cost: the system's allocation, once.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import all_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["all_of_device", "give_back", "given", "paged", "pin", "unpin"]

_PAGE = 4096


def given(memory: torch.Tensor, units: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return existing memory as the only plane of a pool.

    Raises:
        ConfigError: the memory does not have the bytes of the plane.
    """
    wanted = units * sum(sizes)
    if len(sizes) != 1 or memory.nbytes != wanted or memory.dtype != torch.uint8:
        raise ConfigError(
            f"memory of {memory.nbytes} bytes of {memory.dtype} for a pool: one plane of {wanted} "
            f"bytes of {torch.uint8} wanted, and the layout has {len(sizes)}"
        )
    return memory.view(units, sizes[0])


def pin(planes: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Register memory with CUDA for copies by a device and return its addresses.

    torch's caching allocator would round the size up to a power of two.

    Raises:
        ConfigError: memory cannot be pinned. Then none of it stays pinned.
    """
    runtime, done = cast("Any", torch.cuda.cudart()), list[int]()
    for plane in planes:
        status = runtime.cudaHostRegister(plane.data_ptr(), plane.nbytes, 0)
        if int(status):
            unpin(done)
            raise ConfigError(f"{plane.nbytes} bytes of host memory cannot be pinned: {status}")
        done.append(plane.data_ptr())
    return tuple(done)


def unpin(addresses: Iterable[int]) -> None:
    """Unregister memory registered by `pin`."""
    runtime = cast("Any", torch.cuda.cudart())
    for address in addresses:
        runtime.cudaHostUnregister(address)


def all_of_device(device: torch.device) -> int:
    """Return the total bytes of a device's memory, or 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return all_memory() if device.type == "cpu" else 0


def give_back(device: torch.device) -> None:
    """Return torch's cached free memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def paged(units: int, size: int, device: torch.device | str) -> torch.Tensor:
    """Allocate `units` times `size` bytes starting on a page, for direct I/O.

    Raises:
        ConfigError: the system refuses the allocation.
    """
    length = units * size
    try:
        return _paged(units, size, device)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ConfigError(
            f"{length} bytes of memory on {device} for {units} slots of {size} bytes: {reason}; "
            "give less, or raise the limit of the process (`ulimit -v`)"
        ) from error


def _paged(units: int, size: int, device: torch.device | str) -> torch.Tensor:
    length = units * size
    if torch.device(device).type == "cpu":
        # Large pages at least halve the number of address ranges for a device to look up.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, length, flags=private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(units, size)
    whole = torch.empty(length + _PAGE, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + length].view(units, size)
