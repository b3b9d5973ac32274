"""Check of a shared store: tests each operation with real blocks, then measures its speed.

Blocks have random tokens and a private meaning, so no other process finds them.
Invariant: all values written by the check are removed, also after an error, together with files
created by a store in a new folder.
Cost: seconds, and a few hundred MiB through the store.
"""

from __future__ import annotations

import secrets
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from kvtrie._kvtrie import BlockManager, ValueFormat
from kvtrie.errors import ConfigError
from kvtrie.model.shape import ModelShape
from kvtrie.settings.tier import Tier
from kvtrie.tiers.remote.folder import as_it_was
from kvtrie.tiers.remote.open import open_store
from kvtrie.tiers.remote.protocol import Get, Put, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from kvtrie.tiers.remote.protocol import RemoteStore
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["SIZES", "Report", "Speed", "Step", "check_store"]

SIZES = (1 << 16, 1 << 20, 8 << 20, 32 << 20)
"""Bytes of the timed blocks."""

_NS = 1_000_000_000
_LAYERS = 4
_STEP_LAYER = 1 << 14
_LIMIT_NS = 60 * _NS
_MEANING = b"kvtrie remote check".ljust(32, b"\0")


@dataclass(frozen=True, slots=True)
class Step:
    """A tested operation.

    Attributes:
        name: the operation.
        ok: whether the operation behaved as a shared store needs.
        detail: the observation.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Median times for a block size, in nanoseconds.

    Attributes:
        bytes: bytes of a value.
        put_ns: a put.
        get_ns: a get of a whole value into memory.
        plain_ns: a get by the plain client, or None for a back end without a plain client.
    """

    bytes: int
    put_ns: float
    get_ns: float
    plain_ns: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a check.

    Attributes:
        url: the store, its password masked.
        steps: the operations.
        speeds: by size, in ascending order.
    """

    url: str
    steps: tuple[Step, ...]
    speeds: tuple[Speed, ...]

    @property
    def ok(self) -> bool:
        """Whether all operations behaved as a shared store needs."""
        return all(step.ok for step in self.steps)

    def lanes(self) -> dict[str, dict[str, float]]:
        """Return the lanes of tier `remote` by name, in the format of `kvtrie sim`."""
        return {
            "remote read": _lane([(speed.bytes, speed.get_ns) for speed in self.speeds]),
            "remote store": _lane([(speed.bytes, speed.put_ns) for speed in self.speeds]),
        }


@runtime_checkable
class _Plain(Protocol):
    """A back end with a plain client for comparison."""

    def plain(self, name: bytes) -> object:
        """Return the bytes of a value, as read by the client library alone."""
        ...


def check_store(
    url: RemoteUrl,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    on_step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Test each operation of a store, and time it.

    Args:
        url: the store.
        sizes: bytes of the timed blocks. Sizes above the store's limit are skipped.
        repeats: runs per size.
        on_step: called with the name of each step before it begins.

    Raises:
        ConfigError: the store refuses a setting.
        TransferError: the store does not answer.
    """
    with as_it_was(url) if url.scheme == "folder" else nullcontext():
        return _checked(url, sizes, repeats, on_step)


def _checked(
    url: RemoteUrl, sizes: Sequence[int], repeats: int, on_step: Callable[[str], None]
) -> Report:
    on_step("operations")
    began = time.perf_counter_ns()
    with _opened(url, _STEP_LAYER, 3) as world:
        connected = Step("connect", ok=True, detail=f"{_since(began) / 1e6:.1f} ms")
        steps = (connected, *_steps(world))
    speeds: list[Speed] = []
    for size in sizes if all(step.ok for step in steps) else ():
        on_step(f"blocks of {size} bytes")
        try:
            with _opened(url, size // _LAYERS, repeats) as world:
                speeds.append(_speed(world))
        except ConfigError:
            continue  # above the maximum value size of this store
        except _FailedError as error:
            steps = (*steps, Step(f"block of {size / 2**20:g} MiB", ok=False, detail=str(error)))
            break
    return Report(str(url), steps, tuple(speeds))


class _FailedError(Exception):
    """A failed call of the store."""


class _World(NamedTuple):
    store: RemoteStore
    form: ValueFormat
    keys: list[bytes]
    names: list[bytes]
    values: list[Put]


@contextmanager
def _opened(url: RemoteUrl, layer_bytes: int, blocks: int) -> Generator[_World]:
    """Yield an open store and values of new blocks, and remove the values at the end."""
    form = ValueFormat(layers=_LAYERS, layer_bytes=layer_bytes, block_tokens=1, meaning=_MEANING)
    with closing(open_store(url, form)) as store:
        keys, labels = _labelled(blocks)
        packed = form.names(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)).tobytes()
        names = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        rng, shape = np.random.default_rng(), (_LAYERS, layer_bytes)
        memory = [rng.integers(0, 256, shape, np.uint8) for _ in range(blocks)]
        headers = form.headers(list(zip(keys, labels, memory, strict=True)))
        values = [
            Put(name, header, block)
            for name, (header, _), block in zip(names, headers, memory, strict=True)
        ]
        try:
            yield _World(store, form, keys, names, values)
        finally:
            store.remove_many(names, _until())


def _labelled(blocks: int) -> tuple[list[bytes], list[bytes]]:
    """Return keys of random blocks and their labels, as written by a manager."""
    model = ModelShape(layers=_LAYERS, kv_heads=1, head_dim=8, fingerprint="kvtrie remote check")
    tiers = [Tier("gpu", blocks=blocks), Tier("host", blocks=blocks)]
    manager = BlockManager(model, tiers, block_tokens=1)
    tokens = [secrets.randbelow(1 << 31) for _ in range(blocks)]
    manager.mark(tokens, "host", present=True, now=1)
    index = manager.index("host", now=1)
    labels = {bytes(key): bytes(row[0]) for key, row in zip(index.key, index, strict=True)}
    keys = [bytes(key) for key in manager.keys(tokens)]
    return keys, [labels[key] for key in keys]


def _steps(world: _World) -> Generator[Step]:
    store, form, keys, names, values = world
    before = _words(store.exists_many(names, _until())), _words(_get(world, 0)[1])
    yield Step("missing name", set(before) == {"missing"}, ", ".join(before))
    (wrote,) = store.put_many(values[:1], _until())
    yield Step("write", wrote.outcome == "ok", ": ".join(filter(None, wrote)))
    row, found = _get(world, 0)
    proof = form.verify([(keys[0], row.header, row.layers, row.memory)])[0]
    same = np.array_equal(row.memory, values[0].memory)
    yield Step("read and compare", _words(found) == "ok" and proof is None and same, proof or "ok")
    row, found = _get(world, 0, (1, 3))
    proof = form.verify([(keys[0], row.header, row.layers, row.memory)])[0]
    same = np.array_equal(row.memory, values[0].memory[1:3])
    yield Step(
        "read of two layers", _words(found) == "ok" and proof is None and same, proof or "ok"
    )
    other = values[1]._replace(name=names[0])
    again = _words(store.put_many([other], _until()))
    row, found = _get(world, 0)
    kept = _words(found) == "ok" and np.array_equal(row.memory, values[0].memory)
    honoured = getattr(store, "conditional", True)
    how = "the first value stays" if honoured else "by asking first: the store has no such put"
    yield Step("conditional put", again == "ok" and kept, how if kept else "it was replaced")
    flipped = values[2].memory.copy()
    flipped[-1, -1] ^= 1
    store.put_many([values[2]._replace(memory=flipped)], _until())
    row, found = _get(world, 2)
    proof = form.verify([(keys[2], row.header, row.layers, row.memory)])[0]
    noticed = _words(found) == "ok" and proof is not None
    yield Step("flipped byte", noticed, proof or "not noticed")
    store.remove_many(names, _until())
    after = _words(store.exists_many(names, _until()))
    yield Step("remove", after == "missing", after)


def _speed(world: _World) -> Speed:
    store = world.store
    puts = [
        _timed("put", lambda value=value: store.put_many([value], _until()))
        for value in world.values
    ]
    gets = [_timed("get", lambda at=at: _get(world, at)[1]) for at in range(len(world.names))]
    plain = None
    if isinstance(store, _Plain):
        read = store.plain
        plain = median(_timed("plain client", lambda name=name: read(name)) for name in world.names)
    return Speed(world.form.value_bytes, median(puts), median(gets), plain)


def _timed(what: str, call: Callable[[], object]) -> float:
    """Return the nanoseconds of a call.

    Raises:
        _FailedError: the call raises, or has a result other than "ok".
    """
    began = time.perf_counter_ns()
    try:
        found = call()
    except Exception as error:  # each client library has its own errors
        raise _FailedError(f"{what}: {error}") from error
    took = _since(began)
    for one in cast("list[object]", found) if isinstance(found, list) else ():
        if isinstance(one, Result) and one.outcome != "ok":
            raise _FailedError(f"{what}: {one.outcome}{one.reason and f', {one.reason}'}")
    return took


def _since(began: int) -> float:
    return float(time.perf_counter_ns() - began)


def _get(
    world: _World, at: int, layers: tuple[int, int] = (0, _LAYERS)
) -> tuple[Get, list[Result]]:
    memory = np.zeros((layers[1] - layers[0], world.values[at].memory.shape[1]), np.uint8)
    row = Get(world.names[at], layers, np.zeros(world.form.header_bytes, np.uint8), memory)
    return row, world.store.get_many([row], _until())


def _words(found: Sequence[Result]) -> str:
    """Return the distinct outcomes as a text."""
    return ", ".join(dict.fromkeys(one.outcome for one in found))


def _lane(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return bandwidth and latency of the line through the smallest and the largest size."""
    if not points:
        return {}
    (small, soon), (large, late) = points[0], points[-1]
    slope = (late - soon) / (large - small) if late > soon else late / large
    return {"bytes_per_s": round(_NS / slope), "latency_ns": round(max(0.0, soon - small * slope))}


def _until() -> int:
    return time.monotonic_ns() + _LIMIT_NS
