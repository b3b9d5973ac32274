"""The readers of KV events that other tests ask: both forms, tiers, groups, gaps, restarts."""

from contextlib import contextmanager

import msgspec
import pytest
from tests.advise.publishing import message, publishing, removed, stored
from tests.event_readers import LlmdReader, Subscriber, VllmReader

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
