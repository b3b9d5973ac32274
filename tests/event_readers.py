"""Readers of the KV events of an engine, independent of kvtrie, written from the wire form.

A message has three frames: a topic, the batch's number (8 bytes, big-endian) and msgpack
`[time, [event, …], rank]`. An event is a map with the name of its kind under `type`, as vLLM 0.32
sends it, or an array that opens with that name and leaves trailing fields out. A socket of kind
ROUTER answers the number of the first wanted batch with all later ones and an end marker.

`VllmReader` keeps what vLLM's form says, by medium. `LlmdReader` keeps the index of llm-d's
router. `Subscriber` feeds either from sockets and fills gaps by replay; `SnapshotSubscriber` begins
with a snapshot, as llm-d's router can where a publisher serves one.
Invariant: a reader that may have missed the removal of a block forgets all blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

MEDIUMS = "GPU", "CPU", "STORAGE"
_HANDSHAKE = zmq.EVENT_HANDSHAKE_SUCCEEDED
END = (-1).to_bytes(8, "big", signed=True)
WHOLE = {"full_attention", "mla_attention", "sink_full_attention"}  # kinds that see all tokens
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_FIELDS = {
    "BlockStored": _STORED,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def events_of(payload):
    """The events of a batch as dictionaries, whichever of the two forms it has.

    Raises:
        ValueError: it is no batch, or has an event of an unknown kind.
    """
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) < 2:
        raise ValueError(f"no batch of events: {batch!r}")
    return [_event(each) for each in batch[1]]


def _event(raw):
    kind = raw.get("type") if isinstance(raw, dict) else raw[0]
    if kind not in _FIELDS:
        raise ValueError(f"no kind of event: {kind!r}")
    event = dict.fromkeys(_FIELDS[kind])
    named = raw if isinstance(raw, dict) else zip(_FIELDS[kind], raw[1:], strict=False)
    event |= dict(named)
    event["type"] = kind
    for field in ("block_hashes", "parent_block_hash"):
        if event.get(field) is not None:
            many = field == "block_hashes"
            event[field] = [*map(_name, event[field])] if many else _name(event[field])
    return event


def _name(raw):
    """A block's name: an integer as it is, of bytes the last eight."""
    return raw if isinstance(raw, int) else int.from_bytes(raw[-8:], "big")


def _chunks(event):
    """The tokens of each block of a store; None if the event leaves some of its blocks out."""
    tokens, size = event["token_ids"], event["block_size"]
    if len(tokens) != size * len(event["block_hashes"]):
        return None
    return [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]


class Group(NamedTuple):
    """A group of layers, as a store names it; all None for models with one group."""

    number: int | None = None
    kind: str | None = None
    window: int | None = None
    size: int | None = None

    @property
    def whole(self):
        """Whether its layers see all tokens."""
        return self.kind in WHOLE if self.kind else not self.number


class VllmReader:
    """Blocks by medium, as the events of one publisher say.

    An index that matches prompts by their tokens: it takes no notice of salts and images.
    Attributes:
        copies: number of copies of each block, by medium, of a number of a group and a name.
        groups: groups of layers by number.
        number: number of the last batch.
        applied: number of batches.
    """

    def __init__(self):
        self.copies = {medium: Counter() for medium in MEDIUMS}
        self.groups, self.number, self.applied = {}, None, 0
        self._facts = {}  # (parent, tokens, adapter) of a name
        self._children = defaultdict(set)  # names by (parent, adapter, tokens)
        self._sizes = set()

    def apply(self, topic, number, payload):
        """Read a batch; its topic is not looked at."""
        del topic
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                self.clear()
                continue
            copies = self.copies[event["medium"] or "GPU"]
            places = [(event["group_idx"] or 0, name) for name in event["block_hashes"]]
            if event["type"] == "BlockStored":
                self._learn(event)
                copies.update(places)
            else:
                copies.subtract(place for place in places if copies[place] > 0)
        self.number, self.applied = number, self.applied + 1

    def clear(self, topic=b""):
        """Forget all blocks."""
        del topic
        for copies in self.copies.values():
            copies.clear()

    def names(self, medium, group=0):
        """The names of blocks of a group on a medium."""
        copies = self.copies[medium]
        return {name for (at, name), count in copies.items() if at == group and count > 0}

    def counts(self, tokens, medium, *, adapter=None):
        """Return the number of a prompt's first tokens whose blocks are all on one medium."""
        return self._walk(tokens, {None: 0}, medium, adapter)[0]

    def continued(self, tokens, *, adapter=None):
        """Return for each medium the tokens that it has after those of the mediums before it."""
        ends, found = {None: 0}, []
        for medium in MEDIUMS:
            count, ends = self._walk(tokens, ends, medium, adapter)
            found.append(count)
        return tuple(found)

    def border(self, tokens, mediums=MEDIUMS, *, adapter=None):
        """Return the most tokens after which a request can go on with what all groups have."""
        found, ends = 0, {None: 0}
        while ends:
            ends = self._step(tokens, ends, None, adapter)
            for name, end in ends.items():
                if all(self._resumes(each, name, end, mediums, adapter) for each in self._groups()):
                    found = max(found, end)
        return found

    def _groups(self):
        return self.groups.values() or [Group(0)]

    def _resumes(self, group, name, end, mediums, adapter):
        """Whether a group has what a request needs that goes on after a block."""
        need = end if group.whole else min(end, group.window - 1 if group.window else group.size)
        while any(self.copies[each][group.number or 0, name] > 0 for each in mediums):
            need -= group.size
            if need <= 0:
                return True
            name = self._before(name, group.size, adapter)
        return False

    def _before(self, name, size, adapter):
        """The name that comes `size` tokens earlier; None if it is not known."""
        while size > 0:
            name, tokens, of = self._facts.get(name, (None, (), None))
            if not tokens or of != adapter:
                return None
            size -= len(tokens)
        return name

    def _learn(self, event):
        adapter, number = event["lora_name"], event["group_idx"] or 0
        if number not in self.groups or event["kv_cache_spec_kind"]:
            window = event["kv_cache_spec_sliding_window"]
            group = Group(number, event["kv_cache_spec_kind"], window, event["block_size"])
            self.groups[number] = group
        chunks = _chunks(event)
        if chunks is None:
            return
        path = [event["parent_block_hash"], *event["block_hashes"]]
        for (parent, name), tokens in zip(pairwise(path), chunks, strict=True):
            known = self._facts.get(name)
            if known is None or len(known[1]) > len(tokens):
                self._facts[name] = parent, tokens, adapter
                self._children[parent, adapter, tokens].add(name)
                self._sizes.add(len(tokens))
            elif len(known[1]) == len(tokens) and known != (parent, tokens, adapter):
                raise ValueError(f"block {name} is {known} and {(parent, tokens, adapter)}")

    def _step(self, tokens, ends, medium, adapter):
        """Blocks after these with the prompt's next tokens; on a medium, of groups that see all."""
        copies = None if medium is None else self.copies[medium]
        whole = [each.number or 0 for each in self._groups() if each.whole]
        return {
            name: end + size
            for before, end in ends.items()
            for size in self._sizes
            for name in self._children.get((before, adapter, tuple(tokens[end : end + size])), ())
            if copies is None or all(copies[number, name] > 0 for number in whole)
        }

    def _walk(self, tokens, ends, medium, adapter):
        """Go on from these blocks as far as a medium has the prompt's next ones."""
        while more := self._step(tokens, ends, medium, adapter):
            ends = more
        return max(ends.values()), ends


class LlmdReader:
    """The index of llm-d's router: prompts by its own keys, and which pod has them on which tier.

    The topic `kv@pod@model` names the pod. A store maps the engine's names to keys, of which each
    hashes the one before it and the next `size` tokens; a removal finds them by name. Groups of
    layers that do not see all tokens are left out, as are stores that leave blocks out. Stores and
    removals of a name are counted, so the last removal counts. Images are not looked at.

    Args:
        size: tokens of a key.
        clears: tier that `AllBlocksCleared` clears; None clears all. With snapshots it is "gpu".
    """

    def __init__(self, size=16, clears=None):
        self.size, self._clears = size, clears
        self.entries = defaultdict(set)  # (pod, tier, group) by key
        self.skipped = Counter()  # stores and removals that were left out, by reason
        self._numbers = {}  # numbers of keys, by the key before and the tokens
        self._keys = {}  # keys by the engine's name
        self._kinds = {}  # by pod and group
        self._stores = defaultdict(Counter)  # (tier, group, name) by pod

    def apply(self, topic, number, payload):
        """Read a batch.

        Raises:
            ValueError: an event is malformed; none of the batch is applied then.
        """
        del number
        pod, model = _identity(topic)
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                self.clear(topic, self._clears)
            elif event["type"] == "BlockStored":
                self._store(pod, event["lora_name"] or model, event)
            else:
                self._remove(pod, event)

    def clear(self, topic=b"", tier=None):
        """Forget the pod of a topic, on one tier if that is given."""
        pod, _ = _identity(topic)
        for place in [each for each in self._stores[pod] if tier in (None, each[0])]:
            del self._stores[pod][place]
        for key, entries in list(self.entries.items()):
            entries -= {each for each in entries if each[0] == pod and tier in (None, each[1])}
            if not entries:
                del self.entries[key]

    def match(self, tokens, model=""):
        """Return by pod the blocks on any tier, and by tier those that it has from the first on.

        Returns:
            Tuples of blocks and a dictionary of blocks by tier, by pod.
        """
        found = {}
        for at, key in enumerate(self._keys_of(None, tokens, model)):
            for pod in {each[0] for each in self.entries.get(key, ())}:
                matched, tiers = found.get(pod, (0, Counter()))
                if matched != at:
                    continue
                for tier in {each[1] for each in self.entries[key] if each[0] == pod}:
                    if tiers[tier] == at:
                        tiers[tier] += 1
                found[pod] = at + 1, tiers
        return found

    def counts(self, tokens, medium, *, pod="", model=""):
        """Return the number of a prompt's first tokens that a pod has on one medium."""
        _, tiers = self.match(tokens, model).get(pod, (0, Counter()))
        return tiers[medium.lower()] * self.size

    def _keys_of(self, parent, tokens, model):
        """Keys of a run of tokens after a key; None begins a prompt."""
        keys, before = [], model if parent is None else parent
        for at in range(0, len(tokens) - self.size + 1, self.size):
            path = before, *tokens[at : at + self.size]
            before = self._numbers.setdefault(path, len(self._numbers))
            keys.append(before)
        return keys

    def _store(self, pod, model, event):
        group, tokens, names = event["group_idx"], event["token_ids"], event["block_hashes"]
        if group is not None:
            kind = event["kv_cache_spec_kind"] or self._kinds.get((pod, group))
            self._kinds[pod, group] = kind
            if kind not in WHOLE:
                self.skipped["kind of layers"] += 1
                return
            if tokens and _chunks(event) is None:
                self.skipped["blocks left out"] += 1
                return
        parent = event["parent_block_hash"]
        if parent is not None and parent not in self._keys:
            self.skipped["unknown parent"] += 1
            return
        before = None if parent is None else self._keys[parent][-1]
        keys = self._keys_of(before, tokens, model)
        if keys:
            self._map(names, keys)
        elif not tokens:  # a store that names blocks of other tiers
            keys = [key for name in names for key in self._keys.get(name, ())]
        tier = (event["medium"] or "gpu").lower()
        for key in keys:
            self.entries[key].add((pod, tier, group))
        if keys:
            self._stores[pod].update((tier, group, name) for name in names)

    def _map(self, names, keys):
        """Map names to keys, which are fewer or more by a whole factor."""
        share = len(keys) / len(names)
        for at, name in enumerate(names):
            first = int(at * share)
            self._keys[name] = keys[first : max(first + 1, int((at + 1) * share))]

    def _remove(self, pod, event):
        group, tier = event["group_idx"], (event["medium"] or "gpu").lower()
        if group is not None and self._kinds.get((pod, group)) not in WHOLE:
            self.skipped["kind of layers" if (pod, group) in self._kinds else "group"] += 1
            return
        stores = self._stores[pod]
        for name in event["block_hashes"]:
            place = tier, group, name
            stores[place] -= stores[place] > 0
            if stores[place]:
                continue
            del stores[place]
            for key in self._keys.get(name, ()):
                self.entries[key].discard((pod, tier, group))
                if not self.entries[key]:
                    del self.entries[key]


def _identity(topic):
    """The pod and the model of a topic `kv@pod@model`; another topic is a pod as a whole."""
    parts = topic.decode().split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")


class Subscriber:
    """Feeds a reader from the sockets of a publisher.

    It asks for the history when it is made, fills gaps by replay, and lets a reader forget all
    where the history lacks batches, or where numbers go back: the publisher has restarted then.

    Args:
        reader: has `apply(topic, number, payload)` and `clear`.
        endpoint: of the stream.
        replay: endpoint of the history; None has none, so that each gap makes the reader forget.
        topic: the beginning of topics that are read.

    Attributes:
        last: number of the last batch that was applied, None before one.
        gaps: gaps in the stream.
        forgot: times that the reader had to forget all.
    """

    def __init__(self, reader, endpoint, replay=None, *, topic=b""):
        self.reader, self.last, self.gaps, self.forgot = reader, None, 0, 0
        self._newest = None  # the number of the stream's last message
        self._context, self._replay, self._topic = zmq.Context(), replay, topic
        self._stream = self._context.socket(zmq.SUB)
        self._stream.setsockopt(zmq.RCVHWM, 0)
        self._connected, self._connections = self._stream.get_monitor_socket(_HANDSHAKE), 0
        self._stream.connect(endpoint)
        self._stream.subscribe(topic)
        if replay is not None:
            self.catch_up()

    def close(self):
        """Close the sockets."""
        self._stream.disable_monitor()
        self._connected.close()
        self._stream.close(linger=0)
        self._context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def pump(self, wait_ms=0, most=10**9):
        """Apply messages of the stream until none comes within a time; return their number."""
        messages = 0
        while messages < most and self._stream.poll(wait_ms):
            topic, number, payload = self._stream.recv_multipart()
            self._live(topic, int.from_bytes(number, "big"), payload)
            messages += 1
        return messages

    def await_connections(self, number, wait_ms=30_000):
        """Wait until the stream has connected so often: again after a publisher's restart.

        Raises:
            TimeoutError: it does not connect within a time.
        """
        while self._connections < number:
            if not self._connected.poll(wait_ms):
                raise TimeoutError(f"{self._connections} of {number} connections in {wait_ms} ms")
            recv_monitor_message(self._connected)
            self._connections += 1
            self._stream.poll(0)  # it subscribes again while it is asked for messages

    def catch_up(self):
        """Apply all batches of the history after the last one.

        Raises:
            TimeoutError: the publisher does not answer.
        """
        wanted = 0 if self.last is None else self.last + 1
        fresh = self.last is None
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", wanted.to_bytes(8, "big")])
            while True:
                if not dealer.poll(10_000):
                    raise TimeoutError(f"{self._replay} sends no history within 10 s")
                _, topic, raw, payload = dealer.recv_multipart()
                if raw == END:
                    return
                number = int.from_bytes(raw, "big")
                if number > wanted and not fresh:  # removals may be among those that are gone
                    self._forget(topic)
                self._apply(topic, number, payload)
                wanted, fresh = number + 1, False
        finally:
            dealer.close(linger=0)

    def _live(self, topic, number, payload):
        if self._newest is not None and number < self._newest:
            self._forget(topic)
            self.last = None
        self._newest = number
        if self._is_next(number):
            self._apply(topic, number, payload)
        elif self.last is None or number > self.last:  # the history may have had it already
            self.gaps += 1
            if self._replay is not None:
                self.catch_up()
            if self.last is None or number > self.last:
                if not self._is_next(number):
                    self._forget(topic)
                self._apply(topic, number, payload)

    def _is_next(self, number):
        return number == (0 if self.last is None else self.last + 1)

    def _apply(self, topic, number, payload):
        self.reader.apply(topic, number, payload)
        self.last = number

    def _forget(self, topic):
        self.forgot += 1
        self.reader.clear(topic)


class SnapshotSubscriber:
    """Feeds readers from a publisher that serves snapshots, of which vLLM 0.32 has none.

    The second frame of its stream has 16 more bytes, which name the publisher's life, and it sends
    empty batches while it is idle. A socket of kind REP answers `snapshot` with the number of the
    last batch in it (signed; -1 before the first one), the life, and the batches that make it up. A
    gap, another life and a refusal discard the reader and begin again.

    Args:
        make: returns a new reader.
        endpoint: of the stream.
        snapshot: of snapshots.
        topic: the beginning of topics that are read.

    Attributes:
        reader: knows all; None until a snapshot and the stream after it have been read.
    """

    def __init__(self, make, endpoint, snapshot, *, topic=b""):
        self._make, self._snapshot, self._context = make, snapshot, zmq.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.connect(endpoint)
        self._stream.subscribe(topic)
        self._asked = None
        self._begin()

    def close(self):
        """Close the sockets."""
        self._context.destroy(linger=0)

    def pump(self, wait_ms=0):
        """Read what the sockets have, until none has anything for a time."""
        while True:
            poller = zmq.Poller()
            for socket in filter(None, (self._stream, self._asked)):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(wait_ms))
            if not ready:
                return
            if self._stream in ready:
                topic, head, payload = self._stream.recv_multipart()
                self._live(topic, int.from_bytes(head[:8], "big"), head[8:], payload)
            if self._asked in ready:
                self._answer(self._asked.recv_multipart())

    def _begin(self):
        if self._asked is not None:
            self._asked.close(linger=0)
        self.reader, self._asked, self._early = None, None, []

    def _live(self, *message):
        if self.reader is not None:
            self._advance(*message)
            return
        self._early.append(message)
        if self._asked is None:
            self._asked = self._context.socket(zmq.REQ)
            self._asked.connect(self._snapshot)
            self._asked.send(b"snapshot")

    def _answer(self, frames):
        cut, early = int.from_bytes(frames[0], "big", signed=True), self._early
        self._topic, _, self._life, _ = early[0]
        self._begin()
        if cut < -1 or frames[1] != self._life:
            return
        self.reader, self._next = self._make(), cut + 1
        for payload in frames[2:]:
            self.reader.apply(self._topic, cut, payload)
        for message in early:
            if self.reader is not None:
                self._advance(*message)

    def _advance(self, topic, number, life, payload):
        if (topic, life) != (self._topic, self._life) or number > self._next:
            self._begin()
        elif number == self._next:
            self.reader.apply(topic, number, payload)
            self._next += 1
