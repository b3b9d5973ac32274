"""KeyedRemote: blocks of one size in a shared store, by keys that only an engine knows.

For engines that look their blocks up themselves, as `KeyedDisk` is. Invariant: that of
`RemoteClient`; a question ends after `lookup_s`, and every other call after `deadline_s`, in stores
that honour deadlines. Cost: two digests per block and call, and the read or write.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Literal

import torch

from kvtrie._kvtrie import ValueFormat
from kvtrie.tiers.key_label import KEY_TOKENS, content_keys, key_label
from kvtrie.tiers.remote.client import RemoteClient
from kvtrie.tiers.remote.url import RemoteUrl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.tiers.remote.counts import RemoteStats
    from kvtrie.tiers.remote.protocol import RemoteStore

__all__ = ["KeyedRemote"]

_NS = 1_000_000_000


class KeyedRemote:
    """Blocks by key in a shared store.

    Args:
        url: where the store is; see `kvtrie.tiers.remote`.
        meaning: all that decides the bytes: model, layout, rank. Blocks of another meaning are not
            found.
        size: bytes of a block.
        secret: keys names and checksums.
        trust_s: seconds for which a belief is used without asking the store again; None is 60.
        lookup: "all" asks the store, "local" uses only blocks that this process wrote or read; None
            is "all".
        lookup_s: seconds that a question about blocks may take.
        deadline_s: seconds that a read or write of several blocks may take.
        store: the store, if it is open already.
        clock: nanoseconds, as `time.monotonic_ns`.

    Attributes:
        client: the blocks by their content keys.

    Raises:
        ConfigError: a bad URL; a store that is unreachable, with `strict=1` in the URL.
    """

    def __init__(
        self,
        url: str,
        *,
        meaning: str,
        size: int,
        secret: bytes | None = None,
        trust_s: float | None = None,
        lookup: Literal["all", "local"] | None = None,
        lookup_s: float,
        deadline_s: float,
        store: RemoteStore | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        about = f"kvtrie keyed blocks of {size} bytes: {meaning}"
        form = ValueFormat(
            layers=1,
            layer_bytes=size,
            block_tokens=KEY_TOKENS,
            meaning=hashlib.blake2b(about.encode(), digest_size=32).digest(),
            secret=secret,
        )
        parsed = RemoteUrl.parse("a remote URL", url)
        self.client = RemoteClient(
            parsed, form, 1, trust_s=trust_s, lookup=lookup, store=store, clock=clock
        )
        self._clock = clock
        self._lookup_ns, self._deadline_ns = int(lookup_s * _NS), int(deadline_s * _NS)

    def __contains__(self, key: bytes) -> bool:
        return self.leading([key]) == 1

    def leading(self, keys: Iterable[bytes]) -> int:
        """Return the number of leading blocks of a sequence that the store has."""
        return self.client.find(content_keys(keys), self._clock() + self._lookup_ns).blocks

    def present(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each of some blocks, found by itself, whether the store has it."""
        return self.client.holds(content_keys(keys), self._clock() + self._lookup_ns)

    def read_many(self, rows: Sequence[tuple[bytes, NDArray[np.uint8]]]) -> list[bool]:
        """Fill memory with blocks, and return for each whether it was there and whole.

        Args:
            rows: keys, and memory of a block's size for each.
        """
        named = zip(content_keys(key for key, _ in rows), rows, strict=True)
        blocks = [(key.tobytes(), 0, (0, 1), _memory(memory)) for key, (_, memory) in named]
        why = self.client.read_many(blocks, deadline=self._clock() + self._deadline_ns)
        return [reason is None for reason in why]

    def write_many(
        self, rows: Sequence[tuple[bytes, NDArray[np.uint8]]], *, after: bytes | None = None
    ) -> list[bool]:
        """Store blocks, and return for each whether the store has it afterwards.

        Args:
            rows: keys and bytes.
            after: the key of the block before the first of them, of which the store makes no use.
        """
        del after
        named = zip(content_keys(key for key, _ in rows), rows, strict=True)
        blocks = [
            (key.tobytes(), 0, (0, 1), _memory(memory), key_label(name))
            for key, (name, memory) in named
        ]
        why = self.client.write_many(blocks, deadline=self._clock() + self._deadline_ns)
        return [reason is None for reason in why]

    def clear(self) -> None:
        """Drop all beliefs; the store keeps its blocks, which other processes use."""
        self.client.forget()

    def stats(self) -> RemoteStats:
        """Return the counters now."""
        return self.client.stats()

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        self.client.close()


def _memory(memory: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(memory.reshape(1, -1))  # pyright: ignore[reportUnknownMemberType] - torch's
