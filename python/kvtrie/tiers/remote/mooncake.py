"""The back end `mooncake://`: values in memory and disks lent by machines to a Mooncake store.

`mooncake://master:50051?host=ADDRESS&segment_bytes=BYTES&disk=FOLDER`. Values are copied directly
between memory and the lending machines. A pool is registered once, memory of a single block only
for the call. `segment_bytes` lends memory of this machine, and `disk` a folder below it. Mooncake
has no deadlines: with a dead master or lender a call returns after five seconds. Queries run on a
separate thread, abandoned at the deadline. Reads and writes keep the caller's thread until they
return, because they may still use its memory. A value on a dead lender is missing, and other
lenders continue to serve.
Invariant: no abandoned call uses memory of a pool.
Cost: a request per call and block, and a copy of each header.
"""

from __future__ import annotations

import logging
import threading
import time
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from kvtrie.at_exit import end_at_exit
from kvtrie.errors import ConfigError, TransferError
from kvtrie.failure_log import FailureLog
from kvtrie.tiers.remote.mooncake_settings import reach, settings_of
from kvtrie.tiers.remote.protocol import Get, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import Outcome, Put
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["MooncakeStore"]

_T = TypeVar("_T")

_library: Any = import_module("mooncake.store")

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_OPEN_S = 10.0
_CLOSE_S = 5.0
_OUTCOMES: dict[int, Outcome] = {-200: "full", -704: "missing", -706: "refused"}
_OTHER_LENGTH = (-600, -800)  # possible results of a read into memory of a different length
_NO_DISKS = -1300  # the master runs without -enable_offload
_NO_RANGES = -600  # the value is only on a disk


class MooncakeStore:
    """Values in a Mooncake store.

    Args:
        url: its master, with options `host`, this machine's address for other machines (127.0.0.1),
            `segment_bytes` (0), `disk`, `protocol` ("tcp"), `device` and `metadata`
            ("P2PHANDSHAKE").
        form: the format of the values.

    Raises:
        ConfigError: no master in the URL, an unknown option, an invalid size, a disk without
            memory, a folder that cannot be created, or a master without disks.
        TransferError: the master does not answer.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        settings = settings_of(url)
        self._url, self._form = url, form
        self._failures = FailureLog(_LOG, time.monotonic_ns)
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}
        self._headers: list[NDArray[np.uint8]] = []
        self._client: Any = _library.MooncakeDistributedStore()
        reach(url)
        code = _by(lambda: self._client.setup(*settings), _OPEN_S)
        if code == _NO_DISKS:
            self.close()
            raise ConfigError(f"{url}: the master takes no disks: start it with -enable_offload")
        if code != 0:
            why = f"no answer in {_OPEN_S:.0f} s" if code is None else f"code {code}"
            raise TransferError(f"the master of {url}: {why}")

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Check for values of these names."""
        keys = [name.hex() for name in names]
        found = _by(lambda: self._open().batch_is_exist(keys), _left(deadline))
        if found is None:
            return [_LATE] * len(names)
        results = {0: Result("missing"), 1: Result("ok")}
        return [results.get(code) or _failed(code) for code in found]

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        if _left(deadline) <= 0:
            return [_LATE] * len(rows)
        whole = [row for row in rows if self._is_whole(row)]
        try:
            codes = iter(self._wholes(whole))
            found = [
                self._result(row, *(next(codes) if self._is_whole(row) else self._part(row)))
                for row in rows
            ]
        finally:
            self._forget(rows)
        return self._without_dead_lenders(rows, found, deadline)

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write absent values."""
        if not rows or _left(deadline) <= 0:
            return [_LATE] * len(rows)
        headers = [self._header(row.header) for row in rows]
        names, sizes = [row.name.hex() for row in rows], [self._sizes(row) for row in rows]
        try:
            places = [self._places(*both) for both in zip(headers, rows, strict=True)]
            codes = self._open().batch_put_from_multi_buffers(names, places, sizes)
        finally:
            self._forget(rows)
        self._give_back(headers)
        return [Result("ok") if code >= 0 else _failed(code) for code in codes]

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove values, even if another process has just read them."""

        def remove() -> list[int]:
            return [self._open().remove(name.hex(), True) for name in names]

        found = _by(remove, _left(deadline))
        if found is None:
            return [_LATE] * len(names)
        return [Result("ok") if code == 0 else _failed(code) for code in found]

    def plain(self, name: bytes) -> object:
        """Return the bytes of a value, as read by the client library alone."""
        return self._open().get(name.hex())

    def close(self) -> None:
        """Leave the store and withdraw the lent memory."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            _by(client.close, _CLOSE_S)

    def _is_whole(self, row: Get) -> bool:
        return sum(self._sizes(row)) == self._form.value_bytes

    def _wholes(self, rows: Sequence[Get]) -> list[tuple[int, NDArray[np.uint8]]]:
        """Read whole values, and return for each its length or an error code, and its header."""
        if not rows:
            return []
        client, headers = self._open(), [self._header() for _ in rows]
        names, sizes = [row.name.hex() for row in rows], [self._sizes(row) for row in rows]
        places = [self._places(*both) for both in zip(headers, rows, strict=True)]
        codes = client.batch_get_into_multi_buffers(names, places, sizes)
        found: list[tuple[int, NDArray[np.uint8]]] = []
        for name, code, header in zip(names, codes, headers, strict=True):
            size = client.get_size(name) if code in _OTHER_LENGTH else code
            found.append((code if size == self._form.value_bytes else size, header))
        return found

    def _part(self, row: Get) -> tuple[int, NDArray[np.uint8]]:
        """Read the header and some layers of a value, with results as from `_wholes`."""
        client, header, key = self._open(), self._header(), row.name.hex()
        size: int = client.get_size(key)
        if size == self._form.value_bytes:
            starts = (0, self._form.layer_at(row.layers[0]))
            keys, to, places = [[key]], [[[0]]], self._places(header, row)
            asked = [
                ([[[start]]], [[[count]]])
                for start, count in zip(starts, self._sizes(row), strict=True)
            ]
            found = [
                client.get_into_ranges([place], keys, to, *each)[0][0][0]
                for place, each in zip(places, asked, strict=True)
            ]
            if _NO_RANGES in found:
                self._give_back([header])
                return self._part_of_whole(row)
            size = min(size, *found) if min(found) < 0 else size
        return size, header

    def _part_of_whole(self, row: Get) -> tuple[int, NDArray[np.uint8]]:
        """Read a whole value and copy some of its layers, as `_part`."""
        rest = self._form.value_bytes - self._form.header_bytes
        memory = np.empty((1, rest), np.uint8)
        whole = Get(row.name, row.layers, row.header, memory)
        try:
            ((size, header),) = self._wholes([whole])
        finally:
            self._forget([whole])
        begin = self._form.layer_at(row.layers[0]) - self._form.header_bytes
        row.memory.reshape(-1)[:] = memory[0, begin : begin + row.memory.nbytes]
        return size, header

    def _without_dead_lenders(
        self, rows: Sequence[Get], found: list[Result], deadline: int
    ) -> list[Result]:
        """Replace the results of values on dead machines by misses.

        The values of other machines are readable, so the store's circuit breaker must stay closed.
        """
        lost = [at for at, one in enumerate(found) if one.outcome == "unreachable"]
        answers = self.exists_many([rows[at].name for at in lost], deadline) if lost else []
        for at, answer in zip(lost, answers, strict=True):
            if answer.outcome in {"ok", "missing"}:  # the master answers
                why = f"the machine that has a value does not answer: {found[at].reason}"
                self._failures.warn(self._url, why)
                found[at] = Result("missing", why)
        return found

    def _result(self, row: Get, code: int, header: NDArray[np.uint8]) -> Result:
        if code == self._form.value_bytes:
            row.header[:] = header
        self._give_back([header])
        if code < 0:
            return _failed(code)
        wanted = self._form.value_bytes
        return (
            Result("ok") if code == wanted else Result("damaged", f"{code} bytes, {wanted} wanted")
        )

    def _sizes(self, row: Get | Put) -> list[int]:
        return [self._form.header_bytes, row.memory.nbytes]

    def _places(self, header: NDArray[np.uint8], row: Get | Put) -> list[int]:
        return [self._address(header), self._address(row.memory)]

    def _header(self, content: bytes | None = None) -> NDArray[np.uint8]:
        """Return memory for a header, registered once and reused."""
        with self._lock:
            found = self._headers.pop() if self._headers else None
        if found is None:
            found = np.zeros(self._form.header_bytes, np.uint8)
        if content is not None:
            found[:] = np.frombuffer(content, np.uint8)
        return found

    def _give_back(self, headers: Sequence[NDArray[np.uint8]]) -> None:
        with self._lock:
            self._headers.extend(headers)

    def _address(self, memory: NDArray[np.uint8]) -> int:
        """Return the address of memory, after registering its whole pool."""
        begin, size = _region(memory)
        with self._lock:
            if self._known.get(begin, 0) < size:
                for at, length in [*self._known.items()]:
                    if at < begin + size and begin < at + length:  # freed since
                        self._open().unregister_buffer(at)
                        del self._known[at]
                code = self._open().register_buffer(begin, size)
                if code != 0:
                    raise TransferError(f"{size} bytes of memory are not registered: code {code}")
                self._known[begin] = size
        return memory.ctypes.data

    def _forget(self, rows: Sequence[Get] | Sequence[Put]) -> None:
        """Unregister memory outside a pool, because its owner may free it after the call."""
        with self._lock:
            for memory in (row.memory for row in rows):
                begin, size = _region(memory)
                known = size == memory.nbytes and self._known.pop(begin, 0)
                if known and self._client is not None:
                    self._client.unregister_buffer(begin)

    def _open(self) -> Any:  # noqa: ANN401 - a library object
        client = self._client
        if client is None:
            raise TransferError("the store is closed")
        return client


_LATE = Result("late", "the deadline passed")


def _region(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Return address and bytes of the memory viewed by an array, of a tensor the whole storage."""
    array, base = memory, cast("Any", memory).base
    while isinstance(base, np.ndarray):
        array, base = cast("NDArray[np.uint8]", base), cast("Any", base).base
    storage = getattr(base, "untyped_storage", None)
    if storage is not None:
        return storage().data_ptr(), storage().nbytes()
    return array.ctypes.data, array.nbytes


def _failed(code: int) -> Result:
    return Result(_OUTCOMES.get(code, "unreachable"), f"code {code}")


def _left(deadline: int) -> float:
    return (deadline - time.monotonic_ns()) / _NS


def _by(call: Callable[[], _T], seconds: float) -> _T | None:
    """Run a call on a separate thread and return its result, or None after `seconds`."""
    if seconds <= 0:
        return None
    ends: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            ends.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            ends.put((None, error))

    thread = threading.Thread(target=work, name="kvtrie mooncake", daemon=True)
    thread.start()
    end_at_exit(thread)
    try:
        found, error = ends.get(timeout=seconds)
    except Empty:
        return None
    if error is not None:
        raise error
    return found
