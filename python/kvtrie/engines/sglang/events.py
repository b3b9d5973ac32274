"""Pages published as KV events, by block.

SGLang's recorder creates the events with its own hashes. It reads a `Page` like a node of SGLang's
tree. Invariant: a page is published as stored once, after its parent, and as removed on eviction,
in the order of SGLang's nodes. Cost: none without events. Otherwise the tokens and hashes of each
page until its eviction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey

__all__ = ["Page", "PublishedPages"]


class Page:
    """A page with the fields read by SGLang's recorder.

    Args:
        key: its tokens.
        parent: the page before it. None for the root, a page without tokens.

    Attributes:
        ends: whether a node of SGLang's tree ends here, because an insert ended or branched off.
    """

    __slots__ = ("ends", "event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: RadixKey, parent: Page | None) -> None:
        self.key = key
        self.parent = parent
        self.ends = False
        self.hash_value: list[str] | None = None if parent else []  # the recorder fills both in
        self.event_hash_value: list[str] | None = None


class PublishedPages:
    """The published pages, by block.

    Args:
        recorder: SGLang's recorder, None without events.
        page_size: tokens of a page.
    """

    def __init__(self, recorder: KVCacheEventRecorder | None, page_size: int) -> None:
        self._recorder = recorder if recorder is not None and recorder.enabled else None
        self._size = page_size
        self._pages: dict[int, Page] = {}

    def stored(self, blocks: Sequence[int], first: int, key: RadixKey) -> None:
        """Publish new pages.

        Args:
            blocks: handles of all blocks of a key, in order.
            first: index of the first new block. All later blocks are new.
            key: the key.
        """
        if self._recorder is None:
            return
        if first:
            self.split(blocks[first - 1])
        before = self._pages.get(blocks[first - 1]) if first else Page(key[:0], None)
        if before is None:
            return  # a router would lose a child without a published parent
        for at in range(first, len(blocks)):
            page = Page(key[at * self._size : (at + 1) * self._size], before)
            self._recorder.record_store(page)
            self._pages[blocks[at]] = before = page
        self.split(blocks[-1])

    def split(self, block: int) -> None:
        """End a node of SGLang's tree at a block."""
        if block in self._pages:
            self._pages[block].ends = True

    def removed(self, blocks: Iterable[int]) -> None:
        """Publish evictions. Pages of a node are published from first to last, as in SGLang.

        Args:
            blocks: handles in the order of their eviction, ends of sequences first.
        """
        if self._recorder is None:
            return
        node: list[Page] = []
        for block in blocks:
            page = self._pages.pop(block, None)
            if page is None:
                continue
            if node and (page.ends or node[-1].parent is not page):
                self._publish_removed(self._recorder, node)
            node.append(page)
        self._publish_removed(self._recorder, node)

    @staticmethod
    def _publish_removed(recorder: KVCacheEventRecorder, node: list[Page]) -> None:
        for page in reversed(node):
            recorder.record_remove(page)
        node.clear()
