"""KeyOrder: eviction order of blocks identified by an engine's key.

Every key is the content of a block in a `BlockManager` without bytes, and the keys of a sequence
are a path of its trie. So the core's policy decides, with requests, uses, costs and hints, and a
block leaves before its predecessor.
Invariant: a key has a single block. `evict` returns the requested number of keys, or changes
nothing.
Cost: a request is a single call of the core, linear in the path to its last key.
"""

from __future__ import annotations

import hashlib
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._kvtrie import BlockManager, Index
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.model.shape import ModelShape
from kvtrie.settings.argument import whole
from kvtrie.settings.hint import Release, Retain
from kvtrie.settings.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["KeyOrder"]

_SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=16, fingerprint="keys")
_MOST = 2**32 - 2
_WEIGHT = 2  # about the number of tokens of an engine's block per four bytes of its key
_FIGURES = struct.Struct("<QQI12x")  # age, time to live (0), uses, session and priority (0)


class KeyOrder:
    """Keys of blocks and their eviction order.

    Args:
        blocks: maximum number of keys. The caller must evict or remove keys first. With 0 no key is
            ever stored.
        width: bytes of a key, a multiple of 4 up to 64. Keys of a different size are replaced by a
            digest of this size.
        clock: nanoseconds, monotone.

    Raises:
        ConfigError: the number of blocks is not an integer, or is too large.
    """

    def __init__(
        self, blocks: int, *, width: int = 32, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._blocks = whole("the capacity", blocks, 0, _MOST)
        tier = Tier("gpu", blocks=max(self._blocks, 1), owner="none", retained_share=1)
        self._manager = BlockManager(_SHAPE, [tier], block_tokens=width // 4, token_weight=_WEIGHT)
        self._width, self._clock = width, clock
        self._handles: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._before: dict[bytes, bytes | None] = {}  # predecessors are inserted first

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, key: bytes) -> bool:
        return key in self._handles

    def request(self, keys: Iterable[bytes], *, after: bytes | None = None) -> None:
        """Record a request's use of keys, adding missing keys.

        Args:
            keys: keys in the order of their sequence.
            after: the preceding key, ignored if it is not stored.
        """
        handles, before = self._handles, self._before
        path = self._path(after) if after in handles else []
        for key in dict.fromkeys(keys):
            last = path[-1] if path else None
            # A key stored before its sequence was known moves there, unless keys follow it.
            if (
                key not in handles
                or before[key] == last
                or (before[key] is None and key not in path and self._leave(key))
            ):
                path.append(key)
            else:
                self._serve(path)
                path = self._path(key)
        self._serve(path)

    def evict(self, count: int, stay: Iterable[bytes] = ()) -> list[bytes] | None:
        """Remove the next `count` keys in eviction order.

        Args:
            count: number of keys.
            stay: keys to keep, with all their predecessors. Unknown keys are ignored.

        Returns:
            The keys, or None without a change if fewer keys may leave.
        """
        handles = [handle for key in stay if (handle := self._handles.get(key)) is not None]
        try:
            gone = self._manager.evict(count, now=self._clock(), stay=handles)
        except NoSpaceError:
            return None
        keys = [self._keys.pop(handle) for handle in gone.tolist()]
        for key in keys:
            del self._handles[key], self._before[key]
        return keys

    def remove(self, key: bytes) -> None:
        """Remove a key and keep its successors."""
        suffix = dict.fromkeys([key])
        for one, last in self._before.items():
            if last in suffix:
                suffix[one] = last
        for one in reversed(suffix):
            self._leave(one)
        for one, last in list(suffix.items())[1:]:
            self.request([one], after=last)

    def keep(self, keys: Sequence[bytes], priority: int, ttl_ns: int | None = None) -> None:
        """Give keys of a sequence a priority, as for `Retain`. Unknown keys are ignored."""
        keys = [key for key in keys if key in self._handles]
        while keys:
            path = self._path(keys[-1])
            first = len(path) - 1
            keys.pop()
            while keys and first and keys[-1] == path[first - 1]:
                first -= 1
                keys.pop()
            start, tokens = first * self._width // 4, self._tokens(path)
            hint = Retain(tokens=tokens, start=start, priority=priority, ttl=ttl_ns)
            self._manager.hint([hint], now=self._clock())

    def release(self, key: bytes) -> None:
        """Evict a sequence first up to this key, until its next use, as for `Release`."""
        if key in self._handles:
            hint = Release(tokens=self._tokens(self._path(key)))
            self._manager.hint([hint], now=self._clock())

    def ages(self, keys: Iterable[bytes]) -> list[tuple[int, int]]:
        """Return nanoseconds since the last use, and number of uses, of stored keys."""
        blocks = [self._handles[key] for key in keys]
        index = self._manager.index(0, now=self._clock(), blocks=blocks)
        return list(zip(index.age.tolist(), index.uses.tolist(), strict=True))

    def restore(self, rows: Iterable[tuple[bytes, int, int]]) -> None:
        """Add keys with ages and uses to an empty order, each as a separate sequence."""
        if not self._blocks:
            return
        self.request([b""])
        (form, *_), *_ = self._manager.index(0, now=self._clock())
        self.clear()
        head, _, tail = form[_FIGURES.size :].partition(self._content(b""))
        rows = sorted(rows, key=lambda row: -row[1])
        now = self._clock()
        index = Index(
            (_FIGURES.pack(age, 0, uses) + head + self._content(key) + tail, slot, 0, 1)
            for slot, (key, age, uses) in enumerate(rows)
        )
        self._manager.load_index(index, 0, now=now)
        texts = [self._tokens([key]) for key, _, _ in rows]
        found = self._manager.lookup_many(texts, now=now, keep=0)
        for (key, _, _), match in zip(rows, found, strict=True):
            self._add(key, None, int(match.handles[0]))

    def clear(self) -> None:
        """Remove all keys."""
        self._manager.reset()
        self._handles, self._keys, self._before = {}, {}, {}

    def _serve(self, path: list[bytes]) -> None:
        """Record a use of a path and add its missing keys at the end."""
        if not path or not self._blocks:
            return
        now, tokens = self._clock(), self._tokens(path)
        with self._manager.acquire(tokens, now=now, keep=0) as lease:
            matched = lease.matched * 4 // self._width
            if matched < len(path):
                new = lease.commit(tokens[lease.matched :], now=now).new.tolist()
                last = path[matched - 1] if matched else None
                for key, handle in zip(path[matched:], new, strict=True):
                    self._add(key, last, handle)
                    last = key

    def _add(self, key: bytes, last: bytes | None, handle: int) -> None:
        self._handles[key], self._keys[handle], self._before[key] = handle, key, last

    def _path(self, key: bytes | None) -> list[bytes]:
        """Return the keys from the start of the sequence to a stored key."""
        path: list[bytes] = []
        while key is not None:
            path.append(key)
            key = self._before[key]
        path.reverse()
        return path

    def _leave(self, key: bytes) -> bool:
        """Remove a key and return True, unless keys follow it."""
        path = self._path(key)
        try:
            self._manager.mark(
                self._tokens(path), 0, present=False, now=self._clock(), skip=len(path) - 1
            )
        except ConfigError:
            return False
        del self._keys[self._handles.pop(key)], self._before[key]
        return True

    def _tokens(self, path: list[bytes]) -> NDArray[np.uint32]:
        if set(map(len, path)) == {self._width}:
            return np.frombuffer(b"".join(path), np.uint32)
        return np.frombuffer(b"".join(map(self._content, path)), np.uint32)

    def _content(self, key: bytes) -> bytes:
        if len(key) == self._width:
            return key
        return hashlib.blake2b(key, digest_size=self._width).digest()
