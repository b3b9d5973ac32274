"""PublishedBlocks: the blocks on host and disk published as KV events.

A block is published under vLLM's hashes when all of its layers are on a tier, and withdrawn when
any layer leaves. With several groups of layers, each group is published under the same hashes.
Routers count the blocks of the first group. So a block of this group is published only while a
request can resume at its end or later. A block waits for its hash and for the publication of its
parent. Hashes include no weights, so only blocks of the current weights are published and the
blocks of old weights wait. vLLM itself publishes the blocks in the GPU's memory.
Invariant: no child is published before its parent of the first group. Cost: a dictionary entry and
the tokens per block, group and tier, a hash per block, and a step per event of the manager.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrie.engines.vllm.borders import Borders
from kvtrie.engines.vllm.changes import Change, Extra
from kvtrie.engines.vllm.resident_layers import ResidentLayers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vllm.v1.request import Request

    from kvtrie import Event
    from kvtrie.engines.vllm.borders import Needs
    from kvtrie.engines.vllm.changes import Naming

__all__ = ["PublishedBlocks"]


_BORDER = b"border of "
_WEIGHTS = b"weights "
_PLAIN = Extra(), ""


class _Waiting(NamedTuple):
    """An unpublished block, complete on a tier."""

    tier: int
    group: int
    key: bytes
    parent: bytes
    tokens: list[int]


def _restored(place: tuple[int, int, bytes], parent: bytes, tokens: bytes) -> _Waiting:
    """Return a published block as a waiting block."""
    return _Waiting(*place, parent, array("I", tokens).tolist())


class PublishedBlocks:
    """Tracks the published blocks.

    Args:
        layers: layers of a whole block, by group.
        naming: vLLM's names of blocks, or None to compute no hash.
        root: the parent key of first blocks named by tokens alone.
        images: keys of blocks with images found at start.
        last: the last published tier.
        hashes: the number of vLLM's hashes of a block.
        needs: as `BlockManager.resume_needs`, for several groups. None publishes all blocks.

    Attributes:
        missed: events overwritten by the manager before they were read.
        unknown: blocks not published on arrival, because their hash was unknown.
        weights: the name of the published blocks' weights.
    """

    def __init__(
        self,
        layers: Sequence[int],
        naming: Naming | None = None,
        root: bytes = b"",
        images: Collection[bytes] = (),
        last: int = 2,
        *,
        hashes: int = 1,
        needs: Needs | None = None,
    ) -> None:
        self._last, self._per = last, hashes
        self._layers, self._naming, self._root = layers, naming, root
        self._resident = ResidentLayers()
        self._borders = None if needs is None else Borders(needs)
        self._hashes: dict[bytes, bytes] = {}
        self._extras: dict[bytes, tuple[Extra, str]] = {}  # and the name of changed weights
        self.weights = ""
        self._firsts: set[bytes] = set()  # parents of first blocks: no block has these keys
        self._new: dict[
            int, tuple[bytes, Extra, bool, str]
        ] = {}  # by handle, until the next `take`
        self._nameless: dict[int, bytes] = {}
        # Blocks found at start: keys of blocks named by tokens alone, and of blocks with images.
        self._plain: tuple[set[bytes], Collection[bytes]] = {root}, images
        # The parent's key and the tokens by place: tier, group and key.
        self._published: dict[tuple[int, int, bytes], tuple[bytes, bytes]] = {}
        self._shown: Counter[tuple[int, int, bytes]] = Counter()  # by hash instead of key
        self._waiting: dict[bytes, dict[tuple[int, int, bytes], _Waiting]] = {}
        self._next = 0
        self.missed = self.unknown = 0

    @property
    def nameless(self) -> bool:
        """Whether blocks wait for a hash."""
        return bool(self._nameless)

    def learn(
        self, request: Request, handles: Sequence[int], first: int, size: int, *, weights: str = ""
    ) -> None:
        """Record vLLM's hashes of the blocks of a request.

        Args:
            request: the request.
            handles: handles of its blocks from `first` on.
            first: the index of the first of them.
            size: tokens of a block.
            weights: the name of the weights they were computed with.
        """
        per, hashes = self._per, request.block_hashes
        for at, handle in enumerate(handles[: max(0, len(hashes) // per - first)], first):
            name, extra = b"".join(hashes[at * per : (at + 1) * per]), Extra()
            if self._naming is not None:
                extra = self._naming.facts(request, at * size, (at + 1) * size)
            self._new[handle] = name, extra, at == 0, weights

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield the changes to publish, in order.

        Args:
            events: the manager's events of residency.
        """
        for event in events:
            number, key, parent = event.number, event.key, event.parent
            if number is None or key is None or parent is None:
                continue
            self.missed += number - self._next
            self._next = number + 1
            self._name(event, key, parent)
            (before, after), whole = self._resident.note(event, key), self._layers[event.group]
            if self._borders is not None and whole in (before, after):
                resident = after == whole and 0 < event.tier <= self._last
                place, first = (event.tier, event.group, key), parent in self._firsts
                changed = self._borders.change(place, parent, resident=resident, first=first)
                yield from self._turn(changed)
            if 0 < event.tier <= self._last and before != after and whole in (before, after):
                one = _Waiting(event.tier, event.group, key, parent, list(event.tokens or ()))
                if after == whole:
                    yield from self._publish(one)
                else:
                    yield from self._withdraw(one)
            if key not in self._resident:
                self._hashes.pop(key, None)
                self._extras.pop(key, None)
                self._nameless.pop(event.block, None)
        for handle in self._new.keys() & self._nameless.keys():
            yield from self._name_late(self._nameless.pop(handle), *self._new[handle])
        self._new, self._plain = {}, (set[bytes](), ())

    def again(self) -> Iterator[Change]:
        """Withdraw all blocks and publish them again: readers may have forgotten some."""
        yield from self._removed()
        published, self._published = self._published, {}
        self._shown.clear()
        for place, kept in published.items():
            yield from self._publish(_restored(place, *kept))

    def change_weights(self, weights: str) -> Iterator[Change]:
        """Withdraw the blocks of the old weights, and publish the blocks of the new weights.

        Args:
            weights: the name of the new weights.
        """
        self.weights = weights
        yield from self.again()
        for each in list(self._waiting.pop(_WEIGHTS + weights.encode(), {}).values()):
            yield from self._publish(each)

    def clear(self) -> Iterator[Change]:
        """Withdraw all blocks and forget them."""
        yield from self._removed()
        missed, unknown, number, weights = self.missed, self.unknown, self._next, self.weights
        last, per, needs = self._last, self._per, self._borders and self._borders.needs
        self.__init__(self._layers, self._naming, self._root, last=last, hashes=per, needs=needs)
        self.missed, self.unknown, self._next, self.weights = missed, unknown, number, weights

    def _removed(self) -> Iterator[Change]:
        for shown in self._shown:
            yield Change(False, *shown, None, [], Extra())  # noqa: FBT003 - a named tuple's field

    def _name(self, event: Event, key: bytes, parent: bytes) -> None:
        """Look up or compute the hash of an arriving block."""
        if key in self._hashes or event.kind != "stored":
            return
        if (new := self._new.get(event.block)) is not None:
            if self._note_name(key, *new):
                self._firsts.add(parent)
            return
        tokens = list(event.tokens or ())
        plain, images = self._plain
        if parent in plain and key not in images and self._naming is not None:
            self._hashes[key] = self._naming.hash(self._hashes.get(parent), tokens)
            plain.add(key)
            if parent == self._root:
                self._firsts.add(parent)
        elif event.tier:
            self.unknown += event.block not in self._nameless
            self._nameless[event.block] = key

    def _note_name(self, key: bytes, name: bytes, extra: Extra, first: bool, weights: str) -> bool:  # noqa: FBT001 - fields of a tuple
        """Record a block's hash, facts and weights. Return whether it is a first block."""
        self._hashes[key] = name
        if any(extra) or weights:
            self._extras[key] = extra, weights
        return first

    def _name_late(self, key: bytes, *new: Any) -> Iterator[Change]:  # noqa: ANN401 - a row of `_new`
        """Publish the blocks waiting for the hash of a block."""
        first = self._note_name(key, *new)
        for each in list(self._waiting.pop(key, {}).values()):
            if first and each.key == key:  # else a child of it
                self._firsts.add(each.parent)
                if self._borders is not None:
                    yield from self._turn(self._borders.begin(key))
            yield from self._publish(each)

    def _publish(self, block: _Waiting) -> Iterator[Change]:
        """Publish a block and the blocks waiting for it, or let it wait."""
        ready = [block]
        while ready:
            one = ready.pop()
            place, name = one[:3], self._hashes.get(one.key)
            first = one.parent in self._firsts
            if name is None or not (first or self._is_published(one.parent)):
                awaited = one.key if name is None else one.parent
                self._waiting.setdefault(awaited, {})[place] = one
                continue
            extra, weights = self._extras.get(one.key, _PLAIN)
            if weights != self.weights:
                self._waiting.setdefault(_WEIGHTS + weights.encode(), {})[place] = one
                continue
            if self._borders is not None and self._is_uncovered(one):
                self._waiting.setdefault(_BORDER + one.key, {})[place] = one
                continue
            self._published[place] = one.parent, array("I", one.tokens).tobytes()
            shown = one.tier, one.group, name
            self._shown[shown] += 1
            if self._shown[shown] == 1:
                before = None if first else self._hashes[one.parent]
                yield Change(True, *shown, before, one.tokens, extra)  # noqa: FBT003 - the same
            ready += self._waiting.pop(one.key, {}).values()

    def _turn(self, keys: Iterable[bytes]) -> Iterator[Change]:
        """Publish the newly covered blocks of the first group, and withdraw uncovered blocks."""
        for key in keys:
            for each in list(self._waiting.pop(_BORDER + key, {}).values()):
                yield from self._publish(each)
            for tier in range(1, self._last + 1):
                kept = self._published.get(place := (tier, 0, key))
                if kept is not None and self._is_uncovered(one := _restored(place, *kept)):
                    yield from self._withdraw(one)
                    self._waiting.setdefault(_BORDER + key, {})[place] = one

    def _is_uncovered(self, block: _Waiting) -> bool:
        """Return whether a block of the first group is not covered by a border."""
        return self._borders is not None and not (
            block.group or self._borders.is_covered(block.key)
        )

    def _is_published(self, key: bytes) -> bool:
        return any((tier, 0, key) in self._published for tier in (1, 2))

    def _withdraw(self, block: _Waiting) -> Iterator[Change]:
        """Withdraw a published block, or end the wait of an unpublished block."""
        place = block[:3]
        if self._published.pop(place, None) is None:
            weights = _WEIGHTS + self._extras.get(block.key, _PLAIN)[1].encode()
            for awaited in (block.key, block.parent, _BORDER + block.key, weights):
                rows = self._waiting.get(awaited, {})
                rows.pop(place, None)
                if not rows:
                    self._waiting.pop(awaited, None)
            return
        shown = block.tier, block.group, self._hashes[block.key]
        self._shown[shown] -= 1
        if not self._shown[shown]:
            del self._shown[shown]
            yield Change(False, *shown, None, [], Extra())  # noqa: FBT003 - the same
