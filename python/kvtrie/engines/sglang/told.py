"""Told: pages that SGLang's listeners to KV events know of.

SGLang's own recorder makes the events, with its own hashes; it reads what it needs off a `Page`, as
off a node of its tree. Invariant: a page is told stored once, behind the one before it, and removed
when it was evicted. Cost: none unless events are wanted; then a page's tokens and hashes, until it
is evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey

__all__ = ["Page", "Told"]


class Page:
    """One page, as SGLang's recorder reads it.

    Args:
        key: its tokens.
        parent: the page before it; None for the root, which has no tokens.
    """

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: RadixKey, parent: Page | None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value: list[str] | None = None if parent else []  # the recorder fills both in
        self.event_hash_value: list[str] | None = None


class Told:
    """The books of what was told.

    Args:
        recorder: SGLang's; None where it has none.
        page_size: tokens of a page.
    """

    def __init__(self, recorder: KVCacheEventRecorder | None, page_size: int) -> None:
        self._recorder = recorder if recorder is not None and recorder.enabled else None
        self._size = page_size
        self._pages: dict[int, Page] = {}

    def stored(self, blocks: Sequence[int], first: int, key: RadixKey) -> None:
        """Tell of pages that have come.

        Args:
            blocks: handles of all blocks of a key, in order.
            first: index of the first that is new; all behind it are.
            key: the key.
        """
        if self._recorder is None:
            return
        before = self._pages[blocks[first - 1]] if first else Page(key[:0], None)
        for at in range(first, len(blocks)):
            page = Page(key[at * self._size : (at + 1) * self._size], before)
            self._pages[blocks[at]] = before = page
            self._recorder.record_store(page)

    def removed(self, blocks: Iterable[int]) -> None:
        """Tell of blocks that were evicted."""
        if self._recorder is not None:
            for block in blocks:
                self._recorder.record_remove(self._pages.pop(block))
