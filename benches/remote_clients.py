"""Rows of the benches of a remote tier, by store: ours next to a plain client of the store.

Invariant: a store that both sides read keeps the same bytes for both. Cost: a server per row.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
from tests import store_servers

from benches.disk import drop_caches
from benches.remote_sides import MIB, Ours, Size, nothing, paired, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benches.record import Result

_AHEAD = 4  # the fastest of 0, 1, 2, 3, 7 and 127 at 1 MiB
_LENT = 2 << 30  # bytes of the machine that lends memory to a Mooncake store
_BUFFER = 16 << 20


def by_hand(sock: socket.socket) -> Callable[[np.ndarray], None]:
    """`GET` of all blocks, four ahead, their replies received straight into memory."""

    def fill(memory: np.ndarray) -> None:
        line = memoryview(bytearray(32))
        for at, block in enumerate(memory):
            for ahead in range(at + _AHEAD if at else 0, min(at + _AHEAD + 1, len(memory))):
                sock.sendall(b"GET raw:%d\r\n" % ahead)
            length = len(b"$%d\r\n" % len(block))
            receive(sock, line[:length])
            receive(sock, block.data)
            receive(sock, line[:2])

    return fill


def receive(sock: socket.socket, memory: memoryview) -> None:
    """Fill memory."""
    while len(memory):
        memory = memory[sock.recv_into(memory) :]


def redis_rows(folder: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Rows of a Redis server."""
    import redis

    with ExitStack() as stack:
        server = stack.enter_context(store_servers.redis(folder))
        ours = Ours(f"redis://127.0.0.1:{server.port}/0", size)
        stack.callback(ours.close)
        client = stack.enter_context(redis.Redis(port=server.port))
        for at, block in enumerate(ours.right):
            client.set(f"raw:{at}", block.data)
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def library(memory: np.ndarray) -> None:
            for at, block in enumerate(memory):
                block[:] = np.frombuffer(client.get(f"raw:{at}"), np.uint8)

        goal = 2.0 if size.bytes > MIB else 1.3
        peer = timed(ours, by_hand(sock))
        yield paired(f"redis get {size.name}", ours, peer, "GET by hand", goal=0.75, pairs=pairs)
        peer = timed(ours, library)
        yield paired(f"redis-py {size.name}", ours, peer, "redis-py", goal=goal, pairs=pairs)


def in_order(folder: Path, blocks: np.ndarray, header: int) -> list[Path]:
    """The files of blocks, which their first bytes identify."""
    at = {block[:64].tobytes(): number for number, block in enumerate(blocks)}
    files = [file for file in folder.glob("??/*") if file.is_file()]
    return sorted(
        files, key=lambda file: at[np.fromfile(file, np.uint8, 64, offset=header).tobytes()]
    )


def plain(files: list[Path], header: int) -> Callable[[np.ndarray], None]:
    """`readinto` of all files: their headers, then their layers straight into memory."""
    skipped = bytearray(header)

    def fill(memory: np.ndarray) -> None:
        for path, block in zip(files, memory, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(skipped)
                at = 0
                while at < len(block):
                    at += file.readinto(block[at:].data)

    return fill


def folder_rows(folder: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Rows of a folder: read from the device, and from the page cache."""
    drop = drop_caches if pairs > 1 else nothing
    for io, name in (("direct", ""), ("buffered", ", page cache")):
        ours = Ours(f"folder:{folder}/{io}?io={io}", size)
        header = ours.executor.pools[1].form.header_bytes
        files = in_order(folder / io, ours.right, header)

        before = drop if io == "direct" else nothing
        what = f"folder get {size.name}{name}"
        # In the page cache the checksums take as long as the copies.
        goal = 0.8 if io == "direct" else None
        yield paired(
            what,
            ours,
            timed(ours, plain(files, header)),
            "readinto",
            goal=goal,
            pairs=pairs,
            before=before,
        )
        ours.close()


def object_rows(folder: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Rows of a store of S3's protocol."""
    import obstore
    from obstore.store import S3Store

    with ExitStack() as stack:
        server = stack.enter_context(store_servers.seaweedfs(folder))
        store_servers.make_bucket(server)
        os.environ["AWS_ACCESS_KEY_ID"] = store_servers.ACCESS
        os.environ["AWS_SECRET_ACCESS_KEY"] = store_servers.SECRET
        endpoint = f"http://127.0.0.1:{server.port}"
        ours = Ours(f"s3://kvtrie-test/kv?region=us-east-1&endpoint={endpoint}", size)
        stack.callback(ours.close)
        client = S3Store(
            "kvtrie-test",
            endpoint=endpoint,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        for at, block in enumerate(ours.right):
            obstore.put(client, f"raw/{at}", block.tobytes())

        def library(memory: np.ndarray) -> None:
            for at, block in enumerate(memory):
                block[:] = np.frombuffer(obstore.get(client, f"raw/{at}").bytes(), np.uint8)

        peer = timed(ours, library)
        yield paired(f"object get {size.name}", ours, peer, "obstore get", goal=0.9, pairs=pairs)


def mooncake_rows(folder: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Rows of a Mooncake store whose memory another client lends, by TCP."""
    sys.path.append(str(store_servers.SITE))
    from mooncake.store import MooncakeDistributedStore

    def client(lent: int) -> MooncakeDistributedStore:
        made = MooncakeDistributedStore()
        master = f"127.0.0.1:{server.port}"
        settings = ("127.0.0.1", "P2PHANDSHAKE", lent, _BUFFER, "tcp", "", master)
        if (code := made.setup(*settings)) != 0:
            raise SystemExit(f"mooncake: setup gave {code}")
        return stack.enter_context(closing(made))

    with ExitStack() as stack:
        server = stack.enter_context(store_servers.mooncake(folder))
        client(_LENT)
        ours = Ours(f"mooncake://127.0.0.1:{server.port}", size)
        stack.callback(ours.close)
        plain = client(0)
        names = [f"raw:{at}" for at in range(size.blocks)]
        for memory in (ours.right, ours.memory):
            plain.register_buffer(memory.ctypes.data, memory.nbytes)
        for name, block in zip(names, ours.right, strict=True):
            if (code := plain.put_from(name, block.ctypes.data, block.nbytes)) != 0:
                raise SystemExit(f"mooncake: put_from gave {code}")

        def library(memory: np.ndarray) -> None:
            places = [block.ctypes.data for block in memory]
            plain.batch_get_into(names, places, [size.bytes] * size.blocks)

        peer = timed(ours, library)
        yield paired(
            f"mooncake get {size.name}", ours, peer, "batch_get_into", goal=0.9, pairs=pairs
        )
