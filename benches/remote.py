"""A remote tier compared with plain clients: pairs in one run, whole blocks, checks on.

    make bench-remote ARGS="--quick"

Ours loads blocks from the store into host memory through an executor and verifies headers and
checksums. A peer puts the same number of bytes into the same pool memory and verifies nothing:
`GET` written by hand on one connection, the client library and a copy, `readinto` of the same
files. Servers are those of `make stores`; rows without their server are left out. Pairs take turns;
figures are medians, ratios those of the pairs' ratios.
Invariant: both sides move the same bytes. Cost: two minutes.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track
from tests import store_servers

from benches.core.place import place
from benches.disk import drop_caches, quartiles
from benches.record import Result, document, keep, options, show
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import open_pools
from kvtrie.tiers.remote import RemoteStorage
from kvtrie.tiers.remote import Result as Outcome
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OUT = Path(__file__).parent / "results/remote.json"
MIB = 1 << 20
DEADLINE_S = 60.0
_AHEAD = 4  # the fastest of 0, 1, 2, 3, 7 and 127 at 1 MiB


@dataclass(frozen=True)
class Size:
    """Blocks of one size.

    Attributes:
        name: for people.
        layers: layers of a block.
        tokens: tokens of a block, 4 KiB each per layer.
        blocks: blocks of a run.
    """

    name: str
    layers: int
    tokens: int
    blocks: int

    @property
    def model(self) -> ModelShape:
        """The shape whose blocks have this size."""
        return ModelShape(self.layers, 8, head_dim=128, dtype="float16", fingerprint="bench")

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.model.layer_bytes(self.tokens)


def sizes(*, quick: bool) -> list[Size]:
    """A chunk of 256 tokens of a model with 8 B weights, and a block of a small one."""
    if quick:
        return [Size("1 MiB", 16, 16, 2)]
    return [Size("1 MiB", 16, 16, 64), Size("32 MiB", 32, 256, 6)]


class Ours:
    """A manager with host memory above a store that has all of its blocks."""

    def __init__(self, url: str, size: Size) -> None:
        tiers = [
            Tier("host", blocks=size.blocks, write="through"),
            Tier("remote", blocks=10 * size.blocks, path=url),
        ]
        manager = BlockManager(size.model, tiers, block_tokens=size.tokens)
        self.executor = Executor(
            manager, open_pools(size.model, tiers, size.tokens), deadline_s=DEADLINE_S
        )
        self.size, self.manager = size, manager
        self.memory = self.executor.pools[0].planes[0].numpy().reshape(size.blocks, -1)
        # Nothing that a network or a device could make smaller.
        self.right = np.random.default_rng(1).integers(0, 256, self.memory.shape, dtype=np.uint8)
        self.tokens = np.arange(size.blocks * size.tokens, dtype=np.uint32)
        clock = self.executor.clock
        with manager.acquire(self.tokens, now=clock(), keep=0) as lease:
            self.executor.wait(lease)
            self.memory[lease.slots(0)] = self.right
            lease.commit(self.tokens, now=clock())
        self.executor.drain()

    def __call__(self) -> float:
        """Bytes per second of a load of all blocks."""
        clock = self.executor.clock
        self.manager.mark(self.tokens, "host", present=False, now=clock())
        self.memory[:] = 0
        began = time.perf_counter()
        with self.manager.acquire(self.tokens, now=clock(), keep=0, load="all") as lease:
            self.executor.wait(lease)
            took = time.perf_counter() - began
            if lease.matched < len(self.tokens):
                raise SystemExit(f"{lease.matched} of {len(self.tokens)} tokens were found")
            self.check(lease.slots(0))
        return self.right.nbytes / took

    def check(self, slots: object) -> None:
        """Compare all bytes, which is not timed."""
        if not np.array_equal(self.memory[slots], self.right):
            raise SystemExit("a load gave wrong bytes")

    def close(self) -> None:
        """End its threads."""
        self.executor.close()


def timed(ours: Ours, fill: Callable[[np.ndarray], None]) -> Callable[[], float]:
    """Bytes per second of a peer that fills the pool's memory block by block."""

    def run() -> float:
        ours.memory[:] = 0
        began = time.perf_counter()
        fill(ours.memory)
        took = time.perf_counter() - began
        ours.check(slice(None))
        return ours.right.nbytes / took

    return run


def nothing() -> None:
    """Do nothing before a run."""


def paired(
    what: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    name: str,
    *,
    goal: float | None,
    pairs: int,
    before: Callable[[], object] = nothing,
) -> Result:
    """A row: both in turn, the other one first each time."""
    mine: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs):
        turn = [(ours, mine), (peer, theirs)]
        for side, figures in turn if pair % 2 else turn[::-1]:
            before()
            figures.append(side())
    ratios = [our / their for our, their in zip(mine, theirs, strict=True)]
    low, middle, high = quartiles(ratios)
    return Result(
        what=what,
        ours=round(median(mine) / 1e9, 3),
        unit="GB/s",
        peer=round(median(theirs) / 1e9, 3),
        peer_name=name,
        ratio=round(middle, 3),
        goal=goal,
        ok=None if goal is None else middle >= goal,
        more={"ratio_low": low, "ratio_high": high, "pairs": pairs, "load": os.getloadavg()[0]},
    )


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


class HangingStore:
    """A store in memory whose reads return only when they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._inside = threading.Semaphore(0)

    def reached(self) -> None:
        """Return when one read more hangs."""
        if not self._inside.acquire(timeout=DEADLINE_S):
            raise SystemExit("no read reached the store")

    def exists_many(self, names: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Every block is there."""
        return [Outcome("ok") for _ in names]

    def get_many(self, rows: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Hang."""
        self._inside.release()
        self.released.wait()
        return [Outcome("missing") for _ in rows]  # late ones would open the breaker

    def put_many(self, rows: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Keep nothing."""
        return [Outcome("ok") for _ in rows]

    def remove_many(self, names: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Remove nothing."""
        return [Outcome("ok") for _ in names]

    def close(self) -> None:
        """Let reads end."""
        self.released.set()


@contextmanager
def hanging(executor: Executor, store: HangingStore, prompts: list[np.ndarray]) -> Iterator[None]:
    """Loads from the store that do not end within the block, one per prompt."""
    store.released.clear()
    manager = executor.manager
    with ExitStack() as stack:
        leases = []
        for tokens in prompts:
            manager.mark(tokens, "remote", present=True, now=executor.clock())
            lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
            leases.append(stack.enter_context(lease))
            executor.poll()
            store.reached()  # later ones would join this call
        yield
        store.released.set()
        for lease in leases:
            executor.wait(lease)
    executor.drain()


def hang_rows(_: Path, size: Size, pairs: int) -> Iterator[Result]:
    """A hit in host memory while all threads of the store hang, and with a healthy store."""
    blocks = max(size.blocks // 4, 1)
    tiers = [
        Tier("gpu", blocks=blocks + 16, write="never"),
        Tier("host", blocks=blocks + 16, write="never"),
        Tier("remote", blocks=1000 * blocks),
    ]
    store = HangingStore()
    storage = RemoteStorage("folder:/nowhere", size.model, size.tokens, store=store)
    manager = BlockManager(size.model, tiers, block_tokens=size.tokens)
    pools = [*open_pools(size.model, tiers[:2], size.tokens), storage]
    executor = Executor(manager, pools, deadline_s=DEADLINE_S)
    threads = sum("tier2" in thread.name for thread in executor.runner.threads)
    tokens = np.arange(blocks * size.tokens, dtype=np.uint32)
    manager.mark(tokens, "host", present=True, now=executor.clock())
    fresh = iter(range(1, 1 << 30))

    def hit() -> float:
        began = time.perf_counter()
        with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
            executor.wait(lease)
            if lease.matched < len(tokens):
                raise SystemExit("a host hit was lost")
        took = time.perf_counter() - began
        manager.mark(tokens, "gpu", present=False, now=executor.clock())
        return blocks * size.bytes / took

    def hit_while_hanging() -> float:
        prompt = np.arange(size.tokens, dtype=np.uint32)
        others = [prompt + 1000 * len(tokens) * next(fresh) for _ in range(threads)]
        with hanging(executor, store, others):
            return hit()

    hit()
    yield paired(
        "host hit, store hangs", hit_while_hanging, hit, "healthy store", goal=0.65, pairs=3 * pairs
    )
    executor.close()


def keys_rows(_: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Content keys of a prompt of 1000 blocks, next to its lookup."""
    blocks = 1000
    manager = BlockManager(size.model, [Tier("host", blocks=blocks, owner="none")], block_tokens=16)
    tokens = np.arange(16 * blocks, dtype=np.uint32)
    manager.mark(tokens, "host", present=True, now=1)
    figures: dict[str, list[float]] = {"keys": [], "lookup": []}
    calls = {"keys": lambda: manager.keys(tokens), "lookup": lambda: manager.lookup(tokens, now=2)}
    for _pair in range(10 * pairs):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            figures[name].append(1e6 * (time.perf_counter() - began))
    ours, peer = median(figures["keys"]), median(figures["lookup"])
    yield Result("keys", round(ours, 1), "us", round(peer, 1), "lookup", round(peer / ours, 3))


def measured(given: object) -> Iterator[tuple[str, Callable[[Path], Iterator[Result]]]]:
    """Names of groups of rows, and the functions that measure them."""
    small, *large = sizes(quick=given.quick)
    pairs = given.pairs or (1 if given.quick else 15)
    last = (large or [small])[-1]
    servers = {"redis": redis_rows, "seaweedfs": object_rows}
    for size in (small, *large):
        for server, rows in servers.items():
            here = store_servers.PROGRAMS[server].is_file()
            if here and not given.quick and (server == "redis" or size is last):
                yield f"{server} {size.name}", lambda at, rows=rows, s=size: rows(at, s, pairs)
        yield f"folder {size.name}", lambda at, size=size: folder_rows(at, size, pairs)
    yield "host hit", lambda at: hang_rows(at, small, pairs)
    yield "keys", lambda at: keys_rows(at, small, pairs)


def main() -> int:
    """Measure, print, write."""
    parser = options(__doc__, OUT)
    parser.add_argument("--pairs", type=int, help="default: 15")
    parser.add_argument("--folder", type=Path, help="folder of the files; the default is temporary")
    given = parser.parse_args()
    screen = Console(stderr=True)
    rows: list[Result] = []
    cells = list(measured(given))
    for _name, cell in track(cells, "Stores", console=screen, transient=True):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rows += cell(Path(folder))
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
