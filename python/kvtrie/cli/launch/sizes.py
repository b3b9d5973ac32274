"""Sizes of a server: its host memory and its disk, checked against the machine.

Invariant: a share of the machine becomes bytes once, before the engine's processes start, and
data-parallel servers divide host memory and disk. Cost: a look at free memory and free disk.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import (
    all_disk,
    all_memory,
    check_exists,
    free_disk,
    free_memory,
    is_share,
    path_and_size,
    size,
)

if TYPE_CHECKING:
    import argparse

__all__ = ["Sizes", "keep", "sizes_of"]

_DEFAULT_HOST = "25%"
_ADDRESS = re.compile(r"localhost|[\w:-]*[.:][\w.:-]*")


class Sizes(NamedTuple):
    """Sizes of a server, in the format of the engine's settings."""

    host: int | str
    path: str | None
    disk: int | str


def sizes_of(given: argparse.Namespace, servers: int, *, parts: bool = False) -> Sizes:
    """Return the checked sizes of a data-parallel server. A share becomes bytes.

    Args:
        given: the options, with sizes for all servers of this machine together.
        servers: number of data-parallel servers of this machine.
        parts: whether each server takes a separate part of the disk's folder.

    Raises:
        ConfigError: no size, more than the machine has, or a disk of several servers without parts.
    """
    text = _DEFAULT_HOST if given.host is None else given.host
    try:
        host = size("--host", text, of=free_memory)
    except ConfigError as error:
        if _ADDRESS.fullmatch(text) is None:
            raise
        raise ConfigError(
            f"{error}; the address that the engine binds to follows ' -- ': -- --host {text}"
        ) from None
    check_exists("--host", host, all_memory(), "this machine or its control group")
    exact = is_share(text) or servers > 1
    if given.disk is None:
        return Sizes(host // servers if exact else text, None, 0)
    path, room = path_and_size("--disk", given.disk)
    if servers > 1 and not parts:
        raise ConfigError(
            f"--disk and {servers} data-parallel servers: a store has a single writer: start a "
            "server per rank, each with a separate folder"
        )
    path = str(Path(path).absolute())
    disk = size("size of --disk", room, of=lambda: free_disk(path))
    check_exists("--disk", disk, all_disk(path), f"the file system of {path}")
    exact_disk = is_share(room) or servers > 1
    return Sizes(host // servers if exact else text, path, disk // servers if exact_disk else room)


def keep(given: argparse.Namespace) -> dict[str, str]:
    """Return the setting of host memory that survives for the next server.

    Raises:
        ConfigError: a size of host memory that differs at each start.
    """
    if given.keep is None:
        return {}
    if given.host is None or is_share(given.host):
        raise ConfigError(
            f"--keep with --host {given.host or _DEFAULT_HOST}: a share of the free memory differs "
            "at each start, and a file of another size is made again; give a size as 8GB"
        )
    return {"keep": str(Path(given.keep).absolute())}
