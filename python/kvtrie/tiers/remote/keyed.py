"""KeyedRemote: blocks of equal size in a shared store, identified by an engine's keys.

For engines with their own block lookup, like `KeyedDisk`.
Invariant: as for `RemoteClient`. A query ends after `lookup_s`, and every other call after
`deadline_s`, in stores that honour deadlines.
Cost: two digests per block and call, and the read or write.
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
        url: the URL of the store, see `kvtrie.tiers.remote`.
        meaning: the meaning of the bytes: model, layout, rank. Blocks with a different meaning are
            not found.
        size: bytes of a block.
        secret: key for names and checksums.
        trust_s: seconds during which a belief is used without a query. None means 60.
        lookup: "all" queries the store, "local" uses only blocks written or read by this process.
            None means "all".
        lookup_s: maximum seconds of a query.
        deadline_s: maximum seconds of a read or write of several blocks.
        store: the store, if already open.
        clock: nanoseconds, as `time.monotonic_ns`.

    Attributes:
        client: the blocks by their content keys.

    Raises:
        ConfigError: the URL is invalid, or, with `strict=1` in the URL, the store is unreachable.
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
        """Return the number of leading blocks of a sequence in the store."""
        return self.client.find(content_keys(keys), self._clock() + self._lookup_ns).blocks

    def present(self, keys: Iterable[bytes]) -> list[bool]:
        """Return the presence of each block in the store, queried independently."""
        return self.client.holds(content_keys(keys), self._clock() + self._lookup_ns)

    def read_many(self, rows: Sequence[tuple[bytes, NDArray[np.uint8]]]) -> list[bool]:
        """Read blocks into memory, and return for each block whether it was present and intact.

        Args:
            rows: keys, each with memory for a block.
        """
        named = zip(content_keys(key for key, _ in rows), rows, strict=True)
        blocks = [(key.tobytes(), 0, (0, 1), _memory(memory)) for key, (_, memory) in named]
        why = self.client.read_many(blocks, deadline=self._clock() + self._deadline_ns)
        return [reason is None for reason in why]

    def write_many(
        self, rows: Sequence[tuple[bytes, NDArray[np.uint8]]], *, after: bytes | None = None
    ) -> list[bool]:
        """Write blocks, and return for each block whether the store now has it.

        Args:
            rows: keys and bytes.
            after: the key of the block before the first row, unused by the store.
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
        """Drop all beliefs. The store keeps its blocks for other processes."""
        self.client.forget()

    def stats(self) -> RemoteStats:
        """Return the current counters."""
        return self.client.stats()

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        self.client.close()


def _memory(memory: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(memory.reshape(1, -1))  # pyright: ignore[reportUnknownMemberType] - torch's
