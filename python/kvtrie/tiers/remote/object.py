"""The back end `s3://`, `gs://` and `az://`: values as objects of a bucket, through obstore.

`s3://bucket/prefix?endpoint=URL&region=NAME&ca=PATH`. Credentials come from the environment, as
read by obstore, never from the URL. A call requests all of its objects at once and is cancelled at
its deadline, the only time limit of its requests. A request is sent again at most twice after a
closed connection or a server failure. A value is written once, by a conditional put if the store
honours it.
Invariant: an object is read only if it has the length of a value. Bytes are written into pool
memory only before the deadline.
Cost: a request per block and range, and a copy. A put needs an additional `HEAD`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
)

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers.remote.bucket import DENIED, OPTIONS, check_bucket, client_of, line_of
from kvtrie.tiers.remote.protocol import Result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import Get, Put
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["ObjectStore"]

_Row = TypeVar("_Row")
_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_MOST_VALUE = 5 << 30  # maximum bytes of a single put
_OPEN_S = 10.0
_AT_ONCE = 16  # requests of a call
_CHUNK = 1 << 20
_SETTLE_S = 0.05


class ObjectStore:
    """Values in a bucket.

    Args:
        url: the bucket and a prefix of names, with options `endpoint` (not `gs`), `region` (`s3`),
            `ca` and `connect_s`.
        form: the format of the values.

    Attributes:
        conditional: whether the store honours conditional puts.

    Raises:
        ConfigError: credentials in the URL, an unknown option, a missing bucket, denied access, an
            untrusted certificate, or values above 5 GiB.
        TransferError: the store does not answer.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        url.only(OPTIONS[url.scheme])
        if form.value_bytes > _MOST_VALUE:
            raise ConfigError(
                f"a block of {form.value_bytes} bytes, at most {_MOST_VALUE} fit an object: "
                "use fewer tokens per block"
            )
        self._url, self._form = url, form
        self._store = client_of(url)
        self._closed = False
        self.conditional = _run(self._opened)
        if not self.conditional:
            _LOG.warning("%s ignores conditional puts: writers of one block may all send it", url)

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Check for objects of these names with the length of a value."""
        return self._each(names, self._exists, deadline)

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        return self._each(rows, self._get, deadline)

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write absent values, and replace objects of a different length."""
        return self._each(rows, self._put, deadline)

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove objects."""
        return self._each(names, self._remove, deadline)

    def plain(self, name: bytes) -> object:
        """Return the bytes of a value, as read by the client library alone."""
        return obstore.get(self._store, name.hex()).bytes()

    def close(self) -> None:
        """Refuse further calls. The library closes idle connections."""
        self._closed = True

    async def _exists(self, name: bytes) -> Result:
        size = (await obstore.head_async(self._store, name.hex()))["size"]
        return Result("ok") if size == self._form.value_bytes else self._wrong(size)

    async def _get(self, row: Get) -> Result:
        form, (lo, hi) = self._form, row.layers
        start, stop = form.layer_at(lo), form.layer_at(hi)
        header, memory = row.header.data, row.memory.data.cast("B")
        if lo == 0:
            whole = stop == form.value_bytes
            parts = [(None if whole else (0, stop), (header, memory))]
        else:
            parts = [((0, form.header_bytes), (header,)), ((start, stop), (memory,))]
        found = [await self._range(row.name, *part) for part in parts]
        return next((one for one in found if one.outcome != "ok"), found[0])

    async def _range(
        self, name: bytes, part: tuple[int, int] | None, targets: Sequence[memoryview]
    ) -> Result:
        """Read an object, or a part of it, into memory of the exact size."""
        options: Any = None if part is None else {"range": part}
        try:
            found = await obstore.get_async(self._store, name.hex(), options=options)
        except DENIED:
            raise
        except BaseError:
            # A range beyond the end of an object has no specific error.
            if part is None or (result := await self._exists(name)).outcome == "ok":
                raise
            return result
        size, wanted = found.meta["size"], sum(map(len, targets))
        if size != self._form.value_bytes:
            return self._wrong(size)
        at = 0
        async for chunk in found.stream(_CHUNK):
            if at + len(chunk) > wanted:
                return Result("damaged", f"more than {wanted} bytes")
            _scatter(targets, at, memoryview(chunk))
            at += len(chunk)
        return Result("ok") if at == wanted else Result("damaged", f"{at} bytes, {wanted} wanted")

    async def _put(self, row: Put) -> Result:
        exists = False
        try:
            if (await self._exists(row.name)).outcome == "ok":
                return Result("ok")
            exists = True
        except FileNotFoundError:
            pass
        value = [row.header, row.memory.data.cast("B")]
        mode = "create" if self.conditional and not exists else "overwrite"
        try:
            await self._send(row.name.hex(), value, mode)
        except AlreadyExistsError:  # another process was first
            return Result("ok")
        return Result("ok")

    async def _remove(self, name: bytes) -> Result:
        await obstore.delete_async(self._store, name.hex())
        return Result("ok")

    async def _send(self, path: str, value: Any, mode: Any) -> None:  # noqa: ANN401 - as obstore's
        # A single part, because an interrupted multipart upload leaves parts in the bucket.
        await obstore.put_async(self._store, path, value, mode=mode, use_multipart=False)

    async def _opened(self) -> bool:
        """Write and remove an object, and return whether conditional puts are honoured.

        Raises:
            ConfigError: the bucket does not exist, or access is denied.
            TransferError: the store does not answer.
        """
        probe = f"probe-{secrets.token_hex(16)}"
        try:
            async with asyncio.timeout(_OPEN_S):
                await check_bucket(self._url, self._store, probe)
                return await self._honours(probe)
        except TimeoutError:
            raise TransferError(f"no answer in {_OPEN_S:.0f} s") from None
        except DENIED as error:
            raise ConfigError(f"{self._url} may not be used: {line_of(error)}") from error
        except (OSError, BaseError) as error:
            raise TransferError(line_of(error)) from error

    async def _honours(self, probe: str) -> bool:
        try:
            await self._send(probe, b"kvtrie", "create")
            await self._send(probe, b"kvtrie", "create")
        except AlreadyExistsError:
            return True
        except NotSupportedError:
            return False
        else:
            return False
        finally:
            await obstore.delete_async(self._store, probe)

    def _wrong(self, size: int) -> Result:
        return Result("damaged", f"{size} bytes, {self._form.value_bytes} wanted")

    def _each(
        self, rows: Sequence[_Row], one: Callable[[_Row], Awaitable[Result]], deadline: int
    ) -> list[Result]:
        """Return the result of each row. Rows without a result at the deadline are late."""
        if self._closed:
            raise TransferError("the store is closed")
        left = (deadline - time.monotonic_ns()) / _NS
        if left <= 0:
            return [_LATE] * len(rows)

        async def work() -> list[Result]:
            gate, end = asyncio.Semaphore(_AT_ONCE), asyncio.get_running_loop().time() + left

            async def guarded(row: _Row) -> Result:
                try:
                    async with asyncio.timeout_at(end), gate:
                        return await one(row)
                except TimeoutError:
                    return _LATE
                except FileNotFoundError:
                    return Result("missing")
                except DENIED as error:
                    return Result("refused", line_of(error))
                except (OSError, BaseError) as error:
                    return Result("unreachable", line_of(error))

            return await asyncio.gather(*map(guarded, rows))

        return _run(work)


_LATE = Result("late", "the deadline passed")


# An obstore thread still running Python code at interpreter exit aborts the process.
atexit.register(time.sleep, _SETTLE_S)


def _run(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine in a new event loop, even in a thread with a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def _scatter(targets: Sequence[memoryview], at: int, chunk: memoryview) -> None:
    """Copy bytes to an offset of several pieces of memory, viewed as contiguous."""
    for target in targets:
        lo, hi = max(at, 0), min(at + len(chunk), len(target))
        if lo < hi:
            target[lo:hi] = chunk[lo - at : hi - at]
        at -= len(target)
