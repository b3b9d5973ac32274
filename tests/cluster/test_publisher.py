"""`Publisher` against the manager's own copies, through readers of vLLM's and llm-d's forms."""

import socket
import sys
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import zmq
from event_readers import END, LlmdReader, Subscriber, VllmReader
from published_world import ADAPTER, MODEL, PRIVATE, SIZE, PublishedWorld, manager_of, prompts

from kvtrie import BlockManager, LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.cluster import MEDIUMS, Publisher
from kvtrie.cluster.batch_numbers import RESERVED, BatchNumbers
from kvtrie.errors import ClosedError, ConfigError

ANY = "tcp://127.0.0.1:0"
PROMPT = [*range(SIZE * 3)]


def publisher_of(manager, **settings):
    return Publisher(manager, ANY, ANY, **settings)


def subscribed(publisher, reader=None):
    return Subscriber(reader or VllmReader(), publisher.endpoint, publisher.replay)


def caught_up(publisher, subscriber):
    """Read all batches, those from before the subscription out of the history."""
    subscriber.pump(0)
    subscriber.catch_up()
    assert subscriber.last == publisher._numbers.last
    return subscriber.reader


def commit(manager, tokens, now, scope=None):
    lease = manager.acquire(tokens, now=now, scope=scope, keep=0)
    lease.commit(tokens[lease.matched :], now=now)
    lease.release(now=now)


def carry_out(manager, now):
    if ids := [*map(int, manager.moves().id)]:
        manager.complete(ids, now=now)


@pytest.mark.grid
@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("hashes", ["int", "bytes"])
@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_what_the_manager_has(form, hashes, seed):
    random = np.random.default_rng(seed)
    world = PublishedWorld(manager_of(), random, prompts(random))
    with (
        publisher_of(world.manager, form=form, hashes=hashes) as publisher,
        subscribed(publisher) as subscriber,
    ):
        for step in range(200):
            world.step()
            publisher.pump()
            reader = caught_up(publisher, subscriber)
            if step % 10 == 0:
                for prompt in world.prompts:
                    assert reader.continued(prompt) == world.has(prompt)
        counts = publisher.counts
        assert (counts.contents, counts.lost, subscriber.forgot) == (1, 0, 0)
        assert counts.stored >= counts.removed > 100 < counts.withheld


def test_the_copies_of_an_adapter_are_published_under_its_name():
    manager = manager_of()
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:
        commit(manager, PROMPT, 1, ADAPTER)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        assert reader.counts(PROMPT, "GPU", adapter="french") == len(PROMPT)
        assert reader.counts(PROMPT, "GPU") == 0


def test_blocks_of_tenants_and_after_digests_are_counted_and_not_published():
    manager = manager_of(rooms={"gpu": 20})
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:
        for now, scope in enumerate(PRIVATE, 1):
            commit(manager, PROMPT, now, scope)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        # The image is in the second block: the first one is as anyone's.
        assert reader.counts(PROMPT, "GPU") == SIZE
        assert (publisher.counts.stored, publisher.counts.withheld) == (1, 5)
        manager.reset()
        publisher.pump()
        assert publisher.counts.removed == 1


def test_a_copy_is_stored_when_complete_and_removed_when_it_starts_to_leave():
    manager = manager_of(rooms={"gpu": 3, "host": 9}, structure="leaf-only")
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:

        def seen():
            publisher.pump()
            return caught_up(publisher, subscriber).continued(PROMPT)

        lease = manager.acquire(PROMPT, now=1, keep=0)
        assert seen() == (0, 0, 0)
        lease.commit(PROMPT, now=2)
        lease.release(now=2)
        assert seen() == (SIZE * 3, SIZE * 3, SIZE * 3)
        moves = [*map(int, manager.moves().id)]
        assert caught_up(publisher, subscriber).counts(PROMPT, "CPU") == 0
        manager.complete(moves[:1], now=3)
        publisher.pump()
        assert caught_up(publisher, subscriber).counts(PROMPT, "CPU") == SIZE
        manager.complete(moves[1:], now=4)
        manager.acquire([9] * SIZE, now=5, keep=0)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        assert (reader.counts(PROMPT, "GPU"), reader.counts(PROMPT, "CPU")) == (SIZE * 2, SIZE * 3)


def test_the_groups_of_a_model_are_published_by_number():
    groups = (LayerGroup((0, 1)), LayerGroup((2, 3), "sliding", window=SIZE * 2))
    model = ModelShape(4, 2, 8, groups=groups, fingerprint="groups")
    manager = BlockManager(
        model,
        [Tier("gpu", bytes=1 << 20, owner="none")],
        block_tokens=SIZE,
        resume=ResumePoints(),
        events=100,
        events_of="residency",
    )
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:
        commit(manager, PROMPT, 1)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        kinds = {number: (group.kind, group.window) for number, group in reader.groups.items()}
        assert kinds == {0: ("full_attention", None), 1: ("sliding_window", SIZE * 2)}
        assert reader.border(PROMPT) == len(PROMPT)
        assert manager.lookup(PROMPT, now=2, keep=0).tokens == len(PROMPT)


def test_llmd_reads_the_pod_in_the_topic():
    manager = manager_of()
    with (
        publisher_of(manager, topic="kv@pod-7@tiny", form="array") as publisher,
        subscribed(publisher, LlmdReader(SIZE)) as subscriber,
    ):
        commit(manager, PROMPT, 1)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        assert reader.counts(PROMPT, "GPU", pod="pod-7", model="tiny") == len(PROMPT)


def test_a_reader_that_is_too_late_gets_the_contents():
    manager = manager_of(rooms={"gpu": 40})
    with publisher_of(manager, ring=3) as publisher:
        for now in range(1, 9):
            commit(manager, [now] * SIZE, now)
            publisher.pump()
        with subscribed(publisher) as subscriber:
            reader = subscriber.reader
            assert (reader.applied, subscriber.last) == (1, publisher._numbers.last)
            assert len(reader.names("GPU")) == 8
            commit(manager, [9] * SIZE, 9)
            publisher.pump()
            assert len(caught_up(publisher, subscriber).names("GPU")) == 9
        # A second reader gets the contents of before, and what came since.
        with subscribed(publisher) as subscriber:
            assert (subscriber.reader.applied, len(subscriber.reader.names("GPU"))) == (2, 9)
        assert publisher.counts.contents == 1


def test_lost_events_are_replaced_by_the_contents():
    manager = manager_of(events=4, rooms={"gpu": 8, "host": 30})
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:
        for now in range(1, 20):
            commit(manager, [now] * SIZE, now)
            carry_out(manager, now)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        assert (publisher.counts.lost, publisher.counts.contents) == (1, 2)
        assert (len(reader.names("GPU")), len(reader.names("CPU"))) == (8, 19)
        manager.take_events()
        commit(manager, [30] * SIZE, 30)
        manager.take_events()
        commit(manager, [31] * SIZE, 31)
        publisher.pump()
        assert publisher.counts.lost == 2
        assert len(caught_up(publisher, subscriber).names("GPU")) == 8


def test_a_publisher_that_starts_again_clears_what_readers_knew(tmp_path):
    file = tmp_path / "number"
    manager = manager_of()
    commit(manager, PROMPT, 1)
    with publisher_of(manager, number_file=file) as publisher:
        last, (endpoint, replay) = publisher._numbers.last, (publisher.endpoint, publisher.replay)
        subscriber = subscribed(publisher)
        assert subscriber.reader.counts(PROMPT, "GPU") == len(PROMPT)
    assert int(file.read_text()) == last
    other = manager_of()
    with subscriber, Publisher(other, endpoint, replay, number_file=file) as publisher:
        assert publisher._numbers.last > last
        subscriber.catch_up()
        assert subscriber.reader.counts(PROMPT, "GPU") == 0
        assert subscriber.last == publisher._numbers.last


def test_numbers_start_at_the_clock_and_only_grow(tmp_path):
    file = tmp_path / "number"
    numbers = BatchNumbers(file, 5_000)
    assert [numbers.take(), numbers.take()] == [5_000, 5_001]
    assert int(file.read_text()) == 4_999 + RESERVED  # left by a process that is killed
    numbers.close()
    assert int(file.read_text()) == 5_001
    assert BatchNumbers(file, 2_000).take() == 5_002  # the clock was set back
    assert BatchNumbers(file, 9_000_000).take() == 9_000_000
    numbers = BatchNumbers(file, 0)
    first = numbers.take()
    numbers.last += RESERVED
    later = numbers.take()
    numbers = BatchNumbers(file, 0)
    assert first < later < numbers.take()


def test_numbers_go_on_when_their_file_cannot_be_written(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    numbers = BatchNumbers(folder / "number", 100)
    (folder / "number").unlink()
    folder.rmdir()
    numbers.last += RESERVED
    assert numbers.take() == 100 + RESERVED
    numbers.close()
    assert numbers.unwritten == 2


def test_messages_have_the_frames_of_vllm():
    manager = manager_of()
    with publisher_of(manager, dp_rank=3, topic="t", hashes="bytes") as publisher:
        commit(manager, PROMPT, 1)
        publisher.pump()
        frames = ask(publisher, (0).to_bytes(8, "big"))
        assert [len(each) for each in frames] == [4, 4, 4]
        assert frames[-1] == [b"", b"", END, b""]
        numbers = [int.from_bytes(each[2], "big") for each in frames[:2]]
        assert numbers[1] == numbers[0] + 1
        (_, (cleared,), rank), (ts, (stored,), _) = [
            msgspec.msgpack.decode(each[3]) for each in frames[:2]
        ]
        assert (rank, cleared) == (3, {"type": "AllBlocksCleared"})
        keys = [bytes(key) for key in manager.keys(PROMPT)]
        assert isinstance(ts, float)
        assert stored == {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": None,
            "token_ids": PROMPT,
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        assert frames[0][1] == b"t"


def test_hashes_are_the_last_bytes_of_keys():
    manager = manager_of(rooms={"gpu": 20})
    with publisher_of(manager, form="array") as publisher:
        commit(manager, PROMPT[:SIZE], 1)
        publisher.pump()
        commit(manager, PROMPT, 2)
        publisher.pump()
        manager.reset()
        publisher.pump()
        frames = ask(publisher, (0).to_bytes(8, "big"))[:-1]
        events = [msgspec.msgpack.decode(each[3])[1] for each in frames]
        names = [int.from_bytes(bytes(key[-8:]), "big") for key in manager.keys(PROMPT)]
        first, later, removed = [each for (each,) in events[1:]]
        assert first[:4] == ["BlockStored", names[:1], None, PROMPT[:SIZE]]
        assert later[:4] == ["BlockStored", names[1:], names[0], PROMPT[SIZE:]]
        assert removed == ["BlockRemoved", [*reversed(names)], "GPU"]


def ask(publisher, *number):
    """All frames of the answer to a request for batches."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(publisher.replay)
        dealer.send_multipart([b"", *number])
        found = []
        while not found or found[-1][2] != END:
            assert dealer.poll(10_000)
            found.append(dealer.recv_multipart())
        return found
    finally:
        dealer.close(linger=0)
        context.term()


def test_malformed_requests_are_counted_and_others_answered():
    manager = manager_of()
    with publisher_of(manager) as publisher:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay)
        for request in ([b""], [b"", b"7"], [b"", b"\0" * 8, b"more"], [b"x" * 100_000, b"\0" * 9]):
            dealer.send_multipart(request)
        with context.socket(zmq.DEALER) as hostile:
            hostile.connect(publisher.replay)
            hostile.send_multipart([b"", b"\0" * (2 << 20)])  # its connection is cut
        dealer.send_multipart([b"", b"\xff" * 8])
        assert dealer.poll(10_000)
        assert dealer.recv_multipart()[2] == END
        assert publisher.counts.refused == 4
        dealer.close(linger=0)
        context.term()


def test_a_reader_that_takes_nothing_delays_neither_engine_nor_other_readers():
    manager = manager_of(rooms={"gpu": 4000})
    with publisher_of(manager) as publisher:
        context = zmq.Context()
        stuck, slow = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        stuck.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVHWM, 1)
        stuck.connect(publisher.endpoint)
        stuck.subscribe(b"")
        slow.connect(publisher.replay)
        for now in range(1, 3000):
            commit(manager, [now] * SIZE, now)
            publisher.pump()
        slow.send_multipart([b"", (0).to_bytes(8, "big")])
        with subscribed(publisher) as subscriber:
            assert len(subscriber.reader.names("GPU")) == 2999
        for each in (stuck, slow):
            each.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hashes": "sha"}, "'int' or 'bytes'"),
        ({"form": "list"}, "'map' or 'array'"),
        ({"hashes": 3}, "a str wanted"),
        ({"ring": 0}, "ring is 0, 1 to"),
        ({"ring": 2.5}, "whole number"),
        ({"dp_rank": -1}, "dp_rank is -1"),
        ({"topic": b"t"}, "topic"),
        ({"public": 1}, "public"),
        ({"number_file": ""}, "number_file"),
        ({"number_file": "/none/there/number"}, "/none/there/number"),
        ({"endpoint": "tcp://*:5557"}, "public=True"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "public=True"),
        ({"endpoint": "tcp://[::]:5557"}, "public=True"),
        ({"replay": "tcp://10.0.0.1:5557"}, "replay is .*public=True"),
        ({"endpoint": "tcp://127.0.0.1"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:66000"}, "a port 0 to 65535"),
        ({"endpoint": "udp://127.0.0.1:1"}, "tcp://HOST:PORT"),
        ({"endpoint": "inproc://kv"}, "tcp://HOST:PORT"),
        ({"endpoint": "ipc:///none/there/socket"}, "/none/there"),
        ({"endpoint": 5557}, "endpoint is 5557"),
        ({"endpoint": "tcp://no.such.host.invalid:1", "public": True}, "no.such.host.invalid"),
    ],
)
def test_wrong_arguments_are_one_error(given, message):
    manager = manager_of()
    endpoint, replay = given.pop("endpoint", ANY), given.pop("replay", None)
    with pytest.raises(ConfigError, match=message):
        Publisher(manager, endpoint, replay, **given)
    publisher_of(manager).close()  # nothing is held by the one that failed


def test_a_number_file_of_something_else_is_refused(tmp_path):
    manager = manager_of()
    for text in ("", "seven", "-1", "9" * 30, f"{2**63}", "1 2", "\0"):
        file = tmp_path / "number"
        file.write_text(text)
        with pytest.raises(ConfigError, match="number_file"):
            publisher_of(manager, number_file=file)
        assert file.read_text() == text
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="bytes"):
        publisher_of(manager, number_file=tmp_path / "bytes")


def test_an_address_in_use_is_refused_and_free_after_close():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="in use"):
            Publisher(manager_of(), address)
    for _ in range(20):
        with Publisher(manager_of(), address) as publisher, pytest.raises(ConfigError):
            Publisher(manager_of(), publisher.endpoint)
    with pytest.raises(ConfigError, match="in use"):
        Publisher(manager_of(), address, address)


def test_a_manager_has_one_publisher_and_events_of_residency():
    manager = manager_of()
    with publisher_of(manager), pytest.raises(ConfigError, match="has a publisher"):
        publisher_of(manager)
    with publisher_of(manager) as publisher:
        publisher.close()
        publisher.close()
        with pytest.raises(ClosedError, match="publisher is closed"):
            publisher.pump()
    for settings in ({"events": 0}, {"events_of": "evictions"}):
        with pytest.raises(ConfigError, match="events_of='residency'"):
            publisher_of(manager_of(**settings))
    with pytest.raises(ConfigError, match="manager"):
        publisher_of("manager")
    closed = manager_of()
    with publisher_of(closed) as publisher:
        closed.close()
        with pytest.raises(ClosedError):
            publisher.pump()
        assert ask(publisher, b"\0" * 8)[-1][2] == END
    with pytest.raises(ClosedError):
        publisher_of(closed)


def test_an_ipc_socket_is_an_endpoint(tmp_path):
    manager = manager_of()
    commit(manager, PROMPT, 1)
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with Publisher(manager, events, replay) as publisher, subscribed(publisher) as subscriber:
        assert subscriber.reader.counts(PROMPT, "GPU") == len(PROMPT)


def test_a_remote_tier_has_no_medium():
    assert {*MEDIUMS} == {"gpu", "host", "disk"}
    tiers = [Tier("gpu", blocks=8, owner="none"), Tier("host", blocks=20, owner="none")]
    tiers.append(Tier("remote", blocks=90, owner="none"))
    manager = BlockManager(MODEL, tiers, block_tokens=SIZE, events=99, events_of="residency")
    with publisher_of(manager) as publisher, subscribed(publisher) as subscriber:
        manager.mark(PROMPT, "remote", present=True, now=1)
        manager.mark(PROMPT[:SIZE], "host", present=True, now=2)
        publisher.pump()
        reader = caught_up(publisher, subscriber)
        assert reader.continued(PROMPT) == (0, SIZE, SIZE)


def test_packages_are_imported_by_need():
    import subprocess

    program = "import sys, kvtrie.cluster; assert not {'zmq', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_numbers_of_batches_follow_each_other():
    manager = manager_of()
    with publisher_of(manager) as publisher:
        for now in range(1, 6):
            commit(manager, [now] * SIZE, now)
            publisher.pump()
            publisher.pump()
        frames = ask(publisher, b"\0" * 8)[:-1]
        numbers = [int.from_bytes(each[2], "big") for each in frames]
        assert len(numbers) == 6
        assert all(later == earlier + 1 for earlier, later in pairwise(numbers))


def test_each_reader_that_joins_an_idle_publisher_sees_a_batch():
    manager = manager_of()
    with publisher_of(manager, dp_rank=3) as publisher, zmq.Context() as context:
        before = publisher.counts.batches
        publisher.pump()
        assert publisher.counts.batches == before
        for reader in (1, 2):
            with context.socket(zmq.SUB) as stream:
                stream.connect(publisher.endpoint)
                stream.subscribe(b"")
                for _ in range(1000):
                    publisher.pump()
                    if stream.poll(10):
                        break
                assert stream.poll(0)
                _, number, payload = stream.recv_multipart()
            assert int.from_bytes(number, "big") == publisher._numbers.last
            assert msgspec.msgpack.decode(payload)[1:] == [[], 3]
            publisher.pump()
            assert publisher.counts.batches == before + reader


def test_what_readers_send_does_not_wait_in_a_busy_publisher():
    manager = manager_of()
    with publisher_of(manager) as publisher, zmq.Context() as context:
        for now in range(1, 4):
            with context.socket(zmq.SUB) as stream:
                stream.connect(publisher.endpoint)
                stream.subscribe(b"")
                assert publisher._socket.poll(10_000)
                commit(manager, [now] * SIZE, now)
                sent = publisher.counts.batches
                publisher.pump()
                assert publisher.counts.batches == sent + 1
                assert not publisher._socket.poll(0)
