"""The readers of KV events that other tests ask: both forms, tiers, groups, gaps, restarts."""

from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import pytest
import zmq
from tests.advise.publishing import message, publishing, removed, stored
from tests.event_readers import LlmdReader, SnapshotSubscriber, Subscriber, VllmReader

TOPIC = b"kv@pod@m"
PROMPT = [0, 1, 2, 3, 4, 5, 6, 7]
ORDER = {
    "BlockStored": [
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
        "kv_cache_spec_sliding_window",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}


def chain(names, parent=None, first=0, **more):
    """A store of blocks of two tokens, from token `first` on."""
    tokens = list(range(first, first + 2 * len(names)))
    return stored(names, parent, token_ids=tokens, group_idx=None, **more)


def as_array(event):
    """The event as older versions of vLLM send it, without fields at its end that are None."""
    row = [event["type"], *(event.get(field) for field in ORDER[event["type"]])]
    while row[-1] is None:
        del row[-1]
    return row


def apply(reader, *events, form="map", number=0):
    rows = [as_array(event) for event in events] if form == "array" else list(events)
    reader.apply(TOPIC, number, msgspec.msgpack.encode([0.0, rows, 0]))


def asked(reader, medium):
    more = {"pod": "pod", "model": "m"} if isinstance(reader, LlmdReader) else {}
    return reader.counts(PROMPT, medium, **more)


@pytest.fixture(params=["map", "array"])
def form(request):
    return request.param


@pytest.fixture(params=["vllm", "llmd"])
def reader(request):
    return VllmReader() if request.param == "vllm" else LlmdReader(2)


def test_prefixes_count_by_medium(reader, form):
    apply(reader, chain([11, 12, 13]), chain([11, 12], medium="CPU"), form=form)
    apply(reader, chain([14], 13, 6, medium="STORAGE"), form=form)
    assert [asked(reader, each) for each in ("GPU", "CPU", "STORAGE")] == [6, 4, 0]
    apply(reader, removed([12]), removed([11], medium="CPU"), form=form)
    assert [asked(reader, each) for each in ("GPU", "CPU", "STORAGE")] == [2, 0, 0]


def test_a_lower_tier_continues_the_tiers_above():
    reader = VllmReader()
    apply(reader, chain([11, 12]), chain([13], 12, 4, medium="CPU"))
    apply(reader, chain([14], 13, 6, medium="STORAGE"))
    assert reader.continued(PROMPT) == (4, 6, 8)
    matched = LlmdReader(2)
    apply(matched, chain([11, 12]), chain([13], 12, 4, medium="CPU"))
    assert matched.match(PROMPT, "m") == {"pod": (3, {"gpu": 2})}


def test_bytes_name_blocks_by_their_last_eight(reader):
    names = [b"x" * 24 + number.to_bytes(8, "big") for number in (11, 12)]
    apply(reader, chain(names))
    apply(reader, removed([12]))
    assert asked(reader, "GPU") == 2


def test_the_last_removal_of_copies_counts(reader):
    apply(reader, chain([11]), chain([11]), removed([11]))
    assert asked(reader, "GPU") == 2
    apply(reader, removed([11]), removed([11]))
    assert asked(reader, "GPU") == 0
    apply(reader, chain([11]))
    assert asked(reader, "GPU") == 2


def test_a_clear_forgets_all_mediums(reader, form):
    apply(reader, chain([11, 12]), chain([11], medium="CPU"), form=form)
    apply(reader, {"type": "AllBlocksCleared"}, form=form)
    assert [asked(reader, each) for each in ("GPU", "CPU")] == [0, 0]


def test_groups_that_see_all_tokens_count_alone(reader, form):
    whole = {"kv_cache_spec_kind": "full_attention"}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    apply(reader, chain([11, 12, 13]) | {"group_idx": 1} | whole, form=form)
    apply(reader, chain([11, 12, 13, 14]) | {"group_idx": 0} | window, form=form)
    assert asked(reader, "GPU") == 6
    apply(reader, removed([11], group_idx=0), form=form)
    assert asked(reader, "GPU") == 6
    apply(reader, removed([13], group_idx=1), form=form)
    assert asked(reader, "GPU") == 4


def test_the_border_is_where_all_groups_have_what_they_need():
    reader = VllmReader()
    whole = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    state = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    window |= {"group_idx": 2}
    apply(reader, chain([11, 12, 13, 14]) | whole, chain([12], 11, 2) | state)
    assert reader.border(PROMPT) == 4
    apply(reader, chain([14], 13, 6) | state, chain([12, 13], 11, 2) | window)
    assert reader.border(PROMPT) == 0  # neither state has its window of two blocks
    apply(reader, chain([14], 13, 6, medium="CPU") | window)
    assert (reader.border(PROMPT), reader.border(PROMPT, ["GPU"])) == (8, 0)


def test_an_adapter_has_its_own_prompts(reader):
    apply(reader, chain([11, 12], lora_name="tuned"))
    assert asked(reader, "GPU") == 0
    llmd = isinstance(reader, LlmdReader)
    more = {"pod": "pod", "model": "tuned"} if llmd else {"adapter": "tuned"}
    assert reader.counts(PROMPT, "GPU", **more) == 4


def test_an_unknown_event_is_an_error(reader):
    with pytest.raises(ValueError, match="BlockMoved"):
        reader.apply(TOPIC, 0, msgspec.msgpack.encode([0.0, [{"type": "BlockMoved"}], 0]))


def test_llmd_has_keys_of_its_own_length():
    reader = LlmdReader(4)  # two blocks a key
    apply(reader, chain([11, 12]), chain([13, 14], 12, 4))
    assert asked(reader, "GPU") == 8
    apply(reader, removed([13]))
    assert asked(reader, "GPU") == 4
    finer = LlmdReader(1)
    apply(finer, chain([11, 12]), removed([12]))
    assert asked(finer, "GPU") == 2


def test_llmd_skips_a_store_whose_parent_it_does_not_know():
    reader = LlmdReader(2)
    apply(reader, chain([12], 11, 2))
    assert reader.skipped == {"unknown parent": 1}


def batches(*events):
    return [message(at, 0.0, [event], topic=TOPIC) for at, event in enumerate(events)]


@contextmanager
def subscribed(reader, tmp_path, history, *, replay=True):
    """A subscriber that has read a history, and the stream that it listens to."""
    with publishing(tmp_path, history) as (endpoint, asked, stream):
        more = {"replay": asked} if replay else {}
        with Subscriber(reader, endpoint, topic=TOPIC, **more) as subscriber:
            subscriber.await_connections(1)
            assert stream.poll(5000)
            yield subscriber, stream


def test_a_gap_is_filled_by_replay(reader, tmp_path):
    sent = batches(chain([11]), chain([12], 11, 2), chain([13], 12, 4), removed([13]))
    history = sent[:1]
    with subscribed(reader, tmp_path, history) as (subscriber, stream):
        assert asked(reader, "GPU") == 2
        history += sent[1:]
        stream.send_multipart(sent[2])
        stream.send_multipart(sent[3])  # known by then
        assert subscriber.pump(5000, 2) == 2
        assert (subscriber.gaps, subscriber.forgot, subscriber.last) == (1, 0, 3)
        assert asked(reader, "GPU") == 4


def test_a_history_that_lacks_batches_begins_again(reader, tmp_path):
    sent = batches(chain([11]), removed([11]), chain([21], first=8), chain([12], 11, 2))
    history = sent[:1]
    with subscribed(reader, tmp_path, history) as (subscriber, stream):
        history[:] = sent[2:3]
        stream.send_multipart(sent[3])
        assert subscriber.pump(5000, 1) == 1
        assert (subscriber.gaps, subscriber.forgot, subscriber.last) == (1, 1, 3)
        assert asked(reader, "GPU") == 0


def test_a_history_that_ends_too_early_begins_again(reader, tmp_path):
    sent = batches(chain([11]), removed([11]), chain([21], first=8))
    with subscribed(reader, tmp_path, sent[:1]) as (subscriber, stream):
        stream.send_multipart(sent[2])
        assert subscriber.pump(5000, 1) == 1
        assert (subscriber.gaps, subscriber.forgot, subscriber.last) == (1, 1, 2)
        assert asked(reader, "GPU") == 0


def test_a_stream_without_history_forgets_at_a_gap(reader, tmp_path):
    sent = batches(chain([11]), removed([11]), chain([21], first=8))
    with subscribed(reader, tmp_path, [], replay=False) as (subscriber, stream):
        stream.send_multipart(sent[0])
        stream.send_multipart(sent[2])
        assert subscriber.pump(5000, 2) == 2
        assert (subscriber.gaps, subscriber.forgot) == (1, 1)
        assert asked(reader, "GPU") == 0


def bind(socket, port, subscriber):
    """Bind to a port that another socket is about to leave."""
    for _ in range(100):
        with suppress(zmq.ZMQError):
            return socket.bind(f"tcp://127.0.0.1:{port}")
        subscriber.pump(10)
    raise AssertionError(f"port {port} stays in use")


def test_a_stream_goes_on_after_its_publisher_has_restarted(reader):
    with zmq.Context() as context:
        first = context.socket(zmq.XPUB)
        port = first.bind_to_random_port("tcp://127.0.0.1")
        with Subscriber(reader, f"tcp://127.0.0.1:{port}") as subscriber:
            subscriber.await_connections(1)
            first.close(linger=0)
            with context.socket(zmq.XPUB) as second:
                bind(second, port, subscriber)
                subscriber.await_connections(2)
                assert second.poll(5000)
                second.send_multipart(batches(chain([11]))[0])
                assert subscriber.pump(5000, 1) == 1
                assert asked(reader, "GPU") == 2


def test_numbers_that_go_back_are_a_restart(reader, tmp_path):
    history = batches(chain([11]), chain([12], 11, 2))
    again = batches(chain([11], medium="STORAGE"))
    with subscribed(reader, tmp_path, history) as (subscriber, stream):
        stream.send_multipart(history[1])
        assert subscriber.pump(5000, 1) == 1
        assert asked(reader, "GPU") == 4
        history[:] = again
        stream.send_multipart(again[0])
        assert subscriber.pump(5000, 1) == 1
        assert (subscriber.last, subscriber.forgot) == (0, 1)
        assert [asked(reader, each) for each in ("GPU", "STORAGE")] == [0, 2]


class SnapshotPublisher:
    """A publisher that serves a snapshot of its own making, by hand."""

    def __init__(self, context):
        self.stream, self.snapshots = context.socket(zmq.XPUB), context.socket(zmq.REP)
        ports = [
            each.bind_to_random_port("tcp://127.0.0.1") for each in (self.stream, self.snapshots)
        ]
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]

    def send(self, number, *events, life=b"a" * 16):
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.stream.send_multipart([TOPIC, number.to_bytes(8, "big") + life, payload])

    def answer(self, cut, *events, life=b"a" * 16):
        assert self.snapshots.poll(5000)
        assert self.snapshots.recv() == b"snapshot"
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.snapshots.send_multipart([cut.to_bytes(8, "big", signed=True), life, payload])


@pytest.fixture
def snapshots():
    with zmq.Context() as context:
        publisher = SnapshotPublisher(context)
        make = partial(LlmdReader, 2, clears="gpu")
        subscriber = SnapshotSubscriber(make, *publisher.endpoints, topic=b"kv@")
        assert publisher.stream.poll(5000)
        yield publisher, subscriber
        subscriber.close()
        context.destroy(linger=0)


def pumped(subscriber, done):
    for _ in range(500):
        subscriber.pump(10)
        if done():
            return
    raise AssertionError("the subscriber does not get there")


def test_a_snapshot_and_the_stream_after_it_are_all(snapshots):
    publisher, subscriber = snapshots
    publisher.send(6)
    publisher.send(7, removed([13]))
    pumped(subscriber, lambda: publisher.snapshots.poll(0))
    assert subscriber.reader is None
    publisher.answer(6, chain([11, 12, 13]), chain([11], medium="CPU"))
    pumped(subscriber, lambda: subscriber.reader)
    assert [asked(subscriber.reader, each) for each in ("GPU", "CPU")] == [4, 2]
    publisher.send(8, {"type": "AllBlocksCleared"})
    pumped(subscriber, lambda: asked(subscriber.reader, "GPU") == 0)
    assert asked(subscriber.reader, "CPU") == 2


@pytest.mark.parametrize("how", ["a gap", "another life", "a refusal"])
def test_a_snapshot_that_does_not_fit_is_asked_for_again(snapshots, how):
    publisher, subscriber = snapshots
    publisher.send(0)
    pumped(subscriber, lambda: publisher.snapshots.poll(0))
    publisher.answer(-2 if how == "a refusal" else -1, chain([11]))
    life = b"b" * 16 if how == "another life" else b"a" * 16
    if how != "a refusal":
        pumped(subscriber, lambda: subscriber.reader)
    publisher.send(2 if how == "a gap" else 1, chain([12], 11, 2), life=life)
    publisher.send(3, life=life)
    pumped(subscriber, lambda: publisher.snapshots.poll(0))
    assert subscriber.reader is None
    publisher.answer(3, chain([11, 12]), life=life)
    pumped(subscriber, lambda: subscriber.reader)
    assert asked(subscriber.reader, "GPU") == 4
