"""KeyOrder: the order in which blocks leave whose keys only an engine knows.

Every key is the content of one block of a `BlockManager` that has no bytes, and the keys of a
sequence are a path of its trie. So the core's policy decides, as in every manager: requests, uses,
costs and hints count, and a block leaves before the one that it follows.
Invariant: a key has one block; `evict` returns as many keys as were asked for, or changes nothing.
Cost: a request is one call of the core, linear in the path to its last key.
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
_WEIGHT = 2  # tokens of an engine's block per four bytes of its key, about
_FIGURES = struct.Struct("<QQI12x")  # age, no time to live, uses, neither session nor priority


class KeyOrder:
    """Keys of blocks, and which of them leave first.

    Args:
        blocks: the most keys that there are at once; the caller evicts or removes others first.
            With 0 no key is ever there.
        width: bytes of a key, a multiple of 4 up to 64; of other keys a digest of this size counts.
        clock: nanoseconds, monotone.

    Raises:
        ConfigError: no whole number of blocks, or one that is too large.
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
        self._before: dict[bytes, bytes | None] = {}  # parents have their entries first

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, key: bytes) -> bool:
        return key in self._handles

    def request(self, keys: Iterable[bytes], *, after: bytes | None = None) -> None:
        """Note that a request uses keys; those that are not there are added.

        Args:
            keys: in the order of their sequence.
            after: the key before them; one that is not there says nothing.
        """
        handles, before = self._handles, self._before
        path = self._path(after) if after in handles else []
        for key in dict.fromkeys(keys):
            last = path[-1] if path else None
            # A key that came before its sequence was known moves there, unless others follow it.
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
        """Take out the `count` keys that should leave first.

        Args:
            count: how many.
            stay: keys that stay, with all that they follow; others are ignored.

        Returns:
            The keys, or None if fewer may leave; nothing has changed then.
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
        """Forget a key; those that follow it stay, without it."""
        suffix = dict.fromkeys([key])
        for one, last in self._before.items():
            if last in suffix:
                suffix[one] = last
        for one in reversed(suffix):
            self._leave(one)
        for one, last in list(suffix.items())[1:]:
            self.request([one], after=last)

    def keep(self, keys: Sequence[bytes], priority: int, ttl_ns: int | None = None) -> None:
        """Give keys of one sequence a priority as `Retain` does; others are ignored."""
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
        """Let a sequence leave first up to this key, until it is used again, as `Release` does."""
        if key in self._handles:
            hint = Release(tokens=self._tokens(self._path(key)))
            self._manager.hint([hint], now=self._clock())

    def ages(self, keys: Iterable[bytes]) -> list[tuple[int, int]]:
        """Return nanoseconds since the last use, and number of uses, of keys that are there."""
        blocks = [self._handles[key] for key in keys]
        index = self._manager.index(0, now=self._clock(), blocks=blocks)
        return list(zip(index.age.tolist(), index.uses.tolist(), strict=True))

    def restore(self, rows: Iterable[tuple[bytes, int, int]]) -> None:
        """Add keys, to none, with ages and uses; each is a sequence of one key."""
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
        """Forget all keys."""
        self._manager.reset()
        self._handles, self._keys, self._before = {}, {}, {}

    def _serve(self, path: list[bytes]) -> None:
        """Use a path, and add what it lacks at its end."""
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
        """The keys from the start of the sequence to a key that is there."""
        path: list[bytes] = []
        while key is not None:
            path.append(key)
            key = self._before[key]
        path.reverse()
        return path

    def _leave(self, key: bytes) -> bool:
        """Take a key out, unless others follow it."""
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
