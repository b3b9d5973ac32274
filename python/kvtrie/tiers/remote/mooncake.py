"""The back end `mooncake://`: values in the memory that machines lend to a Mooncake store.

`mooncake://master:50051?host=ADDRESS&segment_bytes=BYTES`. Values go straight between memory and
the machines that have them: a pool is registered once, memory of a single block for the call.
`segment_bytes` lends that amount of this machine's memory. Mooncake has no deadlines: with a dead
master a call returns after four seconds. Questions are abandoned on their own thread at the
deadline; reads and writes keep the caller's thread until they return, because they may still use
its memory. Invariant: no call that was given up uses memory of a pool. Cost: a request per call and
block; a copy of each header.
"""

from __future__ import annotations

import threading
import time
from importlib import import_module
from queue import Empty, SimpleQueue
from socket import create_connection
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from kvtrie.at_exit import end_at_exit
from kvtrie.errors import ConfigError, TransferError
from kvtrie.settings.argument import whole
from kvtrie.tiers.remote.protocol import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import Get, Outcome, Put
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["MooncakeStore"]

_T = TypeVar("_T")

_library: Any = import_module("mooncake.store")

_NS = 1_000_000_000
_PORT = 50051
_CONNECT_S = 2.0
_OPEN_S = 10.0
_CLOSE_S = 5.0
_BUFFER = 16 << 20  # bytes of the library's own, which these calls do not use
_MOST_SEGMENT = 1 << 44
_OPTIONS = ("host", "segment_bytes", "protocol", "device", "metadata")
_OUTCOMES: dict[int, Outcome] = {-200: "full", -704: "missing", -706: "refused"}
_OTHER_LENGTH = (-600, -800)  # what a read into memory of another length may give


class MooncakeStore:
    """Values in a Mooncake store.

    Args:
        url: its master; options `host`, this machine's address for the others (127.0.0.1),
            `segment_bytes` (0), `protocol` ("tcp"), `device` and `metadata` ("P2PHANDSHAKE").
        form: the format of the values.

    Raises:
        ConfigError: no master in the URL, an unknown option, a size that is no number.
        TransferError: the master does not answer.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        url.only(_OPTIONS)
        if not url.host:
            raise ConfigError(f"{url} names no master: mooncake://host:port wanted")
        self._form = form
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}
        self._headers: list[NDArray[np.uint8]] = []
        self._client: Any = _library.MooncakeDistributedStore()
        settings = _settings(url)
        _reach(url)
        code = _by(lambda: self._client.setup(*settings), _OPEN_S)
        if code != 0:
            why = f"no answer in {_OPEN_S:.0f} s" if code is None else f"code {code}"
            raise TransferError(f"the master of {url}: {why}")

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Whether there are values of these names."""
        keys = [name.hex() for name in names]
        found = _by(lambda: self._open().batch_is_exist(keys), _left(deadline))
        if found is None:
            return [_LATE] * len(names)
        there = {0: Result("missing"), 1: Result("ok")}
        return [there.get(code) or _failed(code) for code in found]

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        if _left(deadline) <= 0:
            return [_LATE] * len(rows)
        whole = [row for row in rows if self._is_whole(row)]
        try:
            codes = iter(self._wholes(whole))
            return [
                self._result(row, *(next(codes) if self._is_whole(row) else self._part(row)))
                for row in rows
            ]
        finally:
            self._forget(rows)

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write values that are absent."""
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
        """Remove values, also those that another process has just read."""

        def remove() -> list[int]:
            return [self._open().remove(name.hex(), True) for name in names]

        found = _by(remove, _left(deadline))
        if found is None:
            return [_LATE] * len(names)
        return [Result("ok") if code == 0 else _failed(code) for code in found]

    def plain(self, name: bytes) -> object:
        """The bytes of a value, read as the client library alone does."""
        return self._open().get(name.hex())

    def close(self) -> None:
        """Leave the store; memory that this machine lent leaves it too."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            _by(client.close, _CLOSE_S)

    def _is_whole(self, row: Get) -> bool:
        return sum(self._sizes(row)) == self._form.value_bytes

    def _wholes(self, rows: Sequence[Get]) -> list[tuple[int, NDArray[np.uint8]]]:
        """Read whole values; a code, or their bytes, and the header of each."""
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
        """Read the header and some layers of a value; a code, or its bytes, and the header."""
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
            size = min(size, *found) if min(found) < 0 else size
        return size, header

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
        """Memory for a header, which is registered once and used again."""
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
        """The address of memory, all of whose pool is registered."""
        begin, size = _region(memory)
        with self._lock:
            if self._known.get(begin, 0) < size:
                for at, length in [*self._known.items()]:
                    if at < begin + size and begin < at + length:  # it was freed since
                        self._open().unregister_buffer(at)
                        del self._known[at]
                code = self._open().register_buffer(begin, size)
                if code != 0:
                    raise TransferError(f"{size} bytes of memory are not registered: code {code}")
                self._known[begin] = size
        return memory.ctypes.data

    def _forget(self, rows: Sequence[Get] | Sequence[Put]) -> None:
        """Unregister memory that is not a pool's: its owner may free it after the call."""
        with self._lock:
            for memory in (row.memory for row in rows):
                begin, size = _region(memory)
                known = size == memory.nbytes and self._known.pop(begin, 0)
                if known and self._client is not None:
                    self._client.unregister_buffer(begin)

    def _open(self) -> Any:  # noqa: ANN401 - of the library
        client = self._client
        if client is None:
            raise TransferError("the store is closed")
        return client


_LATE = Result("late", "the deadline passed")


def _reach(url: RemoteUrl) -> None:
    """Raise if the master's port is closed: the library would try for a minute and a half."""
    try:
        create_connection((url.host, url.port or _PORT), _CONNECT_S).close()
    except OSError as error:
        raise TransferError(f"the master of {url}: {error}") from error


def _settings(url: RemoteUrl) -> tuple[object, ...]:
    """The arguments of the library's `setup`."""
    options = url.options
    given = options.get("segment_bytes", "0")
    number: object = int(given) if given.isdecimal() else given
    lent = whole(f"option segment_bytes of {url.scheme}:", number, 0, _MOST_SEGMENT)
    master = f"{url.host}:{url.port or _PORT}"
    host, metadata = options.get("host", "127.0.0.1"), options.get("metadata", "P2PHANDSHAKE")
    protocol, device = options.get("protocol", "tcp"), options.get("device", "")
    return host, metadata, lent, _BUFFER, protocol, device, master


def _region(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Address and bytes of the memory that an array is a view of: all of a tensor's."""
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
    """The result of a call on its own thread, which is abandoned if it takes longer: then None."""
    if seconds <= 0:
        return None
    ends: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            ends.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
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
