"""Stores for faults: a folder that fails, and servers of Redis, Valkey, SeaweedFS and Mooncake.

Invariant: after `heal` a store answers, and keeps all that it takes. Cost: a server per store.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager, suppress

from tests import store_servers
from tests.partition import Partition
from tests.remote_mooncake import mooncake_store
from tests.remote_requests import FolderValues
from tests.remote_servers import FarServer, RedisServer, S3Server
from tests.tcp_proxy import TcpProxy

__all__ = ["STORES"]


class FolderStore(FolderValues):
    """A folder that is lost, fills up, and loses files."""

    faults = ("gone", "full", "evict", "foreign")
    outages = ("gone",)
    probe_s = 0.0
    may_be_away = False  # when a process starts: that is an error of its settings
    lost = OSError

    def __init__(self, folder):
        super().__init__(folder)
        self.url = f"folder:{folder}"
        self._away = self.folder.with_name("away")
        self._room = self.folder / "room"

    def fault(self, kind, rng):
        """The mount is gone, there is no room left, another client removes or adds files."""
        if kind == "gone" and not self._away.exists():
            self.folder.rename(self._away)
            self.folder.touch()
        elif kind == "full" and self.folder.is_dir():
            with suppress(OSError), self._room.open("wb") as file:
                while file.write(bytes(1 << 20)):
                    file.flush()
        elif kind == "evict":
            for name in self.names():
                if rng.random() < 0.5:
                    self.remove(name)
        elif kind == "foreign" and self.folder.is_dir():
            for place in ("staging", "00"):
                with suppress(OSError):  # there may be no room
                    (self.folder / place).mkdir(exist_ok=True)
                    (self.folder / place / f"{rng.random()}").write_bytes(b"foreign")

    def heal(self):
        if self._away.exists():
            self.folder.unlink()
            self._away.rename(self.folder)
        self._room.unlink(missing_ok=True)


@contextmanager
def folder_store(folder):
    """A folder on a small file system, where this user may mount one."""
    root = folder / "mount"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "kvtrie-test", str(root)]
    mounted = not subprocess.run(command, check=False, capture_output=True).returncode
    try:
        store = FolderStore(root / "kv")
        if not mounted:
            store.faults = tuple(kind for kind in store.faults if kind != "full")
        yield store
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(root)], check=True)  # noqa: S607 - as above


@contextmanager
def server_store(folder, start=store_servers.valkey):
    with start(folder) as server, TcpProxy(server.port) as proxy:
        yield RedisServer(server, proxy)


@contextmanager
def far_store(folder):
    """A server in a second network namespace; this one is not the machine's."""
    with Partition() as link, store_servers.valkey(folder, link=link) as server:
        yield FarServer(server, link)


@contextmanager
def s3_store(folder):
    os.environ["AWS_ACCESS_KEY_ID"] = store_servers.ACCESS
    os.environ["AWS_SECRET_ACCESS_KEY"] = store_servers.SECRET
    with store_servers.seaweedfs(folder) as server, TcpProxy(server.port) as proxy:
        yield S3Server(server, proxy)


STORES = {
    "folder": folder_store,
    "valkey": server_store,
    "redis": lambda folder: server_store(folder, store_servers.redis),
    "seaweedfs": s3_store,
    "mooncake": mooncake_store,
    "partition": far_store,
}
