"""An engine of several groups of layers without kvtrie: one LRU pool of pages, and vLLM's events.

Names of blocks are those of prefixes: the id of the last base block that a block holds.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

from publishing import message, removed, stored

from kvtrie.advise.wire import Reader

NS = 1_000_000_000


class Group(NamedTuple):
    """A group of layers: vLLM's name of its kind, tokens of its window, and of its blocks."""

    kind: str
    window: int
    size: int


class HybridEngine:
    """Serves a trace, request by request.

    Args:
        room: pages of its cache, of which each block of any group takes one.
        base: tokens of a block of the trace.
        groups: its groups, of which one has full attention.
        dense: keep the windows of all borders, not only of the last one.
    """

    def __init__(self, room, base, groups, *, dense=True):
        self.room, self.base, self.groups, self.dense = room, base, groups, dense
        self.border = math.lcm(*(group.size for group in groups))
        self.lru = OrderedDict()
        self.reader = Reader()
        self.number = 0
        self.hits = []

    def batches(self, requests, start=1000.0):
        """Yield its batches, as they are read from its messages."""
        for request in requests:
            path = request.blocks.tolist()
            hit = self._hit(path)
            self.hits.append(hit)
            kept = [self._kept(group, len(path) * self.base) for group in self.groups]
            for at, blocks in enumerate(kept):  # ends of requests leave first
                for block in reversed(blocks):
                    self.lru.pop((at, self._name(path, at, block)), None)
            events = []
            for at, (group, blocks) in enumerate(zip(self.groups, kept, strict=True)):
                events += self._stored(at, group, path, hit, blocks, request.session)
            events = [*self._removed(), *events]
            yield self.reader.read(message(self.number, start + request.at / NS, events))
            self.number += 1

    def _name(self, path, at, block):
        return path[(block + 1) * self.groups[at].size // self.base - 1]

    def _hit(self, path):
        """The tokens of the longest prefix of which every group has what it needs."""
        tokens = len(path) * self.base
        for border in range(tokens // self.border * self.border, 0, -self.border):
            if all(
                (at, self._name(path, at, block)) in self.lru
                for at, group in enumerate(self.groups)
                for block in self._needed(group, border)
            ):
                return border
        return 0

    def _needed(self, group, border):
        last = border // group.size
        if group.kind == "mamba":
            return range(last - 1, last)
        first = max(0, border - group.window + 1) // group.size if group.window else 0
        return range(first, last)

    def _kept(self, group, tokens):
        """The blocks of a prompt that the group keeps."""
        whole = tokens // group.size
        if group.kind == "mamba":
            return [
                block
                for block in (tokens // self.border * self.border // group.size - 1,)
                if block >= 0
            ]
        if group.window and not self.dense:
            return list(self._needed(group, whole * group.size))
        return list(range(whole))

    def _stored(self, at, group, path, hit, blocks, session):
        """The event of the blocks after a hit; its token ids are those of all of them."""
        first, last = hit // group.size, len(path) * self.base // group.size
        for block in blocks:
            self.lru[at, self._name(path, at, block)] = None
        new = [self._name(path, at, block) for block in blocks if block >= first]
        if last <= first:
            return []
        parent = self._name(path, at, first - 1) if first else None
        return [
            stored(
                new,
                parent,
                group.size,
                token_ids=[0] * ((last - first) * group.size),
                group_idx=at,
                kv_cache_spec_kind=group.kind,
                kv_cache_spec_sliding_window=group.window or None,
                session_id=session,
            )
        ]

    def _removed(self):
        gone = []
        while len(self.lru) > self.room:
            (at, name), _ = self.lru.popitem(last=False)
            gone.append(removed([name], group_idx=at))
        return gone
