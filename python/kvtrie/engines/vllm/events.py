"""PublishedBlocks: the blocks on host and disk that were published as KV events.

A block is published under the hashes that vLLM gives it, when all of its layers have come to a
tier, and taken back when any of them leaves. With several groups of layers, that is done for each
group under the same hashes. A block whose hash is not known, and a block whose parent has not been
published, waits for that. vLLM publishes blocks in the GPU's memory itself.
Invariant: no child is published before its parent of the first group. Cost: a dictionary entry per
block, group and tier, a hash per block, and a step per event of the manager.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vllm.v1.request import Request

    from kvtrie import Event

__all__ = ["Change", "Extra", "Naming", "PublishedBlocks"]


class Extra(NamedTuple):
    """The facts in a block's hash other than its tokens.

    Attributes:
        lora_id: vLLM's number of the adapter.
        lora_name: its name.
        keys: salt, adapter and images of each of its hashes, as vLLM's events have them; empty if
            none has any.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    keys: tuple[tuple[Any, ...] | None, ...] = ()


class Naming(Protocol):
    """vLLM's names of blocks."""

    def hash(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Return the hashes of a block of tokens alone, one after the other."""
        ...

    def facts(self, request: Request, start: int, end: int) -> Extra:
        """Return the facts of a request's block other than its tokens."""
        ...


class Change(NamedTuple):
    """A block that came whole to a tier, or that is whole there no more.

    Attributes:
        stored: whether it came.
        tier: index of the tier.
        group: index of the group of layers.
        hash: vLLM's hashes of it, one after the other.
        parent: those of the block before it; None for a first one.
        tokens: its tokens.
        extra: the facts in its hash other than its tokens.
    """

    stored: bool
    tier: int
    group: int
    hash: bytes
    parent: bytes | None
    tokens: list[int]
    extra: Extra


class _Waiting(NamedTuple):
    """A block that is whole on a tier and not published."""

    tier: int
    group: int
    key: bytes
    parent: bytes
    tokens: list[int]


class PublishedBlocks:
    """The books of what was published.

    Args:
        layers: layers of a whole block, by group.
        naming: vLLM's names of blocks; None computes no hash.
        root: the parent key of first blocks that are named by tokens alone.
        images: keys of blocks with images, of those found at start.
        last: the last tier whose blocks are published.
        hashes: the number of vLLM's hashes of a block.

    Attributes:
        missed: events that the manager overwrote before they were taken.
        unknown: blocks that were not published when they came, for want of a hash.
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
    ) -> None:
        self._images, self._last, self._per = images, last, hashes
        self._layers, self._naming, self._root = layers, naming, root
        # Layers by tier, group and key, as the places below.
        self._there: dict[tuple[int, int, bytes], set[int]] = {}
        self._places: Counter[bytes] = Counter()  # that have something of a block, vLLM's too
        self._hashes: dict[bytes, bytes] = {}
        self._extras: dict[bytes, Extra] = {}
        self._firsts: set[bytes] = set()  # parents of first blocks: no block has these keys
        self._new: dict[int, tuple[bytes, Extra, bool]] = {}  # by handle, until the next `take`
        self._nameless: dict[int, bytes] = {}
        self._plain: set[bytes] | None = {root}  # found at start, and named by tokens alone
        self._published: set[tuple[int, int, bytes]] = set()
        self._shown: Counter[tuple[int, int, bytes]] = Counter()  # by hash instead of key
        self._waiting: dict[bytes, dict[tuple[int, int, bytes], _Waiting]] = {}
        self._next = 0
        self.missed = self.unknown = 0

    @property
    def nameless(self) -> bool:
        """Whether blocks wait for a hash."""
        return bool(self._nameless)

    def learn(self, request: Request, handles: Sequence[int], first: int, size: int) -> None:
        """Note the hashes that vLLM gives the blocks of a request.

        Args:
            request: the request.
            handles: handles of its blocks from `first` on.
            first: the index of the first of them.
            size: tokens of a block.
        """
        per, hashes = self._per, request.block_hashes
        for at, handle in enumerate(handles[: max(0, len(hashes) // per - first)], first):
            name, extra = b"".join(hashes[at * per : (at + 1) * per]), Extra()
            if self._naming is not None:
                extra = self._naming.facts(request, at * size, (at + 1) * size)
            self._new[handle] = name, extra, at == 0

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield the changes to publish, in order.

        Args:
            events: events of residency, as the manager gave them.
        """
        for event in events:
            number, key, parent = event.number, event.key, event.parent
            if number is None or key is None or parent is None:
                continue
            self.missed += number - self._next
            self._next = number + 1
            self._name(event, key, parent)
            (before, after), whole = self._note(event, key), self._layers[event.group]
            if 0 < event.tier <= self._last and before != after and whole in (before, after):
                one = _Waiting(event.tier, event.group, key, parent, list(event.tokens or ()))
                if after == whole:
                    yield from self._publish(one)
                else:
                    yield from self._withdraw(one)
            if key not in self._places:
                self._hashes.pop(key, None)
                self._extras.pop(key, None)
                self._nameless.pop(event.block, None)
        for handle in self._new.keys() & self._nameless.keys():
            key = self._nameless.pop(handle)
            self._hashes[key], extra, first = self._new[handle]
            if any(extra):
                self._extras[key] = extra
            for each in list(self._waiting.pop(key, {}).values()):
                if first and each.key == key:  # the others are its children
                    self._firsts.add(each.parent)
                yield from self._publish(each)
        self._new, self._plain, self._images = {}, None, ()

    def clear(self) -> Iterator[Change]:
        """Take all back."""
        for shown in self._shown:
            yield Change(False, *shown, None, [], Extra())  # noqa: FBT003 - a named tuple's field
        missed, unknown, number = self.missed, self.unknown, self._next
        self.__init__(self._layers, self._naming, self._root, last=self._last, hashes=self._per)
        self.missed, self.unknown, self._next = missed, unknown, number

    def _name(self, event: Event, key: bytes, parent: bytes) -> None:
        """Find the hash of a block that comes."""
        if key in self._hashes or event.kind != "stored":
            return
        if (new := self._new.get(event.block)) is not None:
            self._hashes[key], extra, first = new
            if any(extra):
                self._extras[key] = extra
            if first:
                self._firsts.add(parent)
            return
        tokens = list(event.tokens or ())
        plain = self._plain or set[bytes]()
        if parent in plain and key not in self._images and self._naming is not None:
            self._hashes[key] = self._naming.hash(self._hashes.get(parent), tokens)
            plain.add(key)
            if parent == self._root:
                self._firsts.add(parent)
        elif event.tier:
            self.unknown += event.block not in self._nameless
            self._nameless[event.block] = key

    def _publish(self, block: _Waiting) -> Iterator[Change]:
        """Publish a block and all that waited for it; or let it wait."""
        ready = [block]
        while ready:
            one = ready.pop()
            place, name = one[:3], self._hashes.get(one.key)
            first = one.parent in self._firsts
            if name is None or not (first or self._is_published(one.parent)):
                behind = one.key if name is None else one.parent
                self._waiting.setdefault(behind, {})[place] = one
                continue
            self._published.add(place)
            shown = one.tier, one.group, name
            self._shown[shown] += 1
            if self._shown[shown] == 1:
                before = None if first else self._hashes[one.parent]
                extra = self._extras.get(one.key, Extra())
                yield Change(True, *shown, before, one.tokens, extra)  # noqa: FBT003 - the same
            ready += self._waiting.pop(one.key, {}).values()

    def _is_published(self, key: bytes) -> bool:
        return any((tier, 0, key) in self._published for tier in (1, 2))

    def _withdraw(self, block: _Waiting) -> Iterator[Change]:
        """Take a block back, if it was published."""
        place = block[:3]
        for behind in (block.key, block.parent):
            rows = self._waiting.get(behind, {})
            rows.pop(place, None)
            if not rows:
                self._waiting.pop(behind, None)
        if place not in self._published:
            return
        self._published.remove(place)
        shown = block.tier, block.group, self._hashes[block.key]
        self._shown[shown] -= 1
        if not self._shown[shown]:
            del self._shown[shown]
            yield Change(False, *shown, None, [], Extra())  # noqa: FBT003 - the same

    def _note(self, event: Event, key: bytes) -> tuple[int, int]:
        """Layers of the event's group and block on its tier, before the event and after it."""
        place = event.tier, event.group, key
        layers = self._there.setdefault(place, set())
        before, named = len(layers), range(event.layer_lo, event.layer_hi)
        if event.kind == "stored":
            layers.update(named)
        else:
            layers.difference_update(named)
        if layers and not before:
            self._places[key] += 1
        if not layers:
            del self._there[place]
            if before:
                self._places[key] -= 1
                if not self._places[key]:
                    del self._places[key]
        return before, len(layers)
