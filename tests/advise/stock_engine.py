"""An engine without kvtrie: an LRU cache of whole prefixes, and the events that it publishes."""

from collections import OrderedDict

from kvtrie.advise.wire import Batch, Stored

NS = 1_000_000_000


class StockEngine:
    """Serves a trace, request by request.

    Args:
        room: blocks of its cache.
        size: tokens of a block.
        chunk: blocks of a step of a prefill.
    """

    def __init__(self, room, size, chunk=10**9):
        self.room, self.size, self.chunk = room, size, chunk
        self.lru = OrderedDict()
        self.number = 0
        self.hits = []

    def batches(self, requests, start=1000.0):
        """Yield its batches; a request's full blocks are its prompt."""
        for request in requests:
            full = request.input_tokens // self.size
            path = request.blocks[:full].tolist()
            hits = next((n for n, block in enumerate(path) if block not in self.lru), full)
            self.hits.append(hits)
            removed = self._insert(path)
            at = start + request.at / NS
            for first in range(hits, full, self.chunk):
                part = path[first : first + self.chunk]
                parent = path[first - 1] if first else None
                yield self._batch(at, part, parent, request.session, removed)
                removed = []
            tip = path[-1] if path else None
            for block in [] if request.answer is None else request.answer.tolist():
                removed = self._insert([*path, block])
                yield self._batch(at, [block], tip, request.session, removed)
                path.append(block)
                tip = block

    def _insert(self, path):
        for block in path:
            if block in self.lru:
                self.lru.move_to_end(block)
        new = [block for block in path if block not in self.lru]
        removed = []
        while len(self.lru) + len(new) > self.room:
            removed.append(self.lru.popitem(last=False)[0])
        for block in reversed(path):  # of one request the last blocks leave first
            self.lru.pop(block, None)
            self.lru[block] = None
        return removed

    def _batch(self, at, blocks, parent, session, removed):
        self.number += 1
        stored = Stored(blocks, parent, self.size, session)
        return Batch(self.number - 1, at, [stored], removed, rank=0)
