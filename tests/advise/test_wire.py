"""Messages of both engines are read, and what cannot be read is named."""

import pytest
from publishing import message, pages, removed, stored

from kvtrie.advise.wire import Part, Reader, Stored
from kvtrie.errors import ConfigError


def read(*events):
    return Reader().read(message(3, 1.5, list(events)))


def test_a_batch_of_vllm():
    batch = read(
        stored([1, b"\x02"], None, session_id="chat", extra_keys=[["salt"], None]),
        removed([7, 8], group_idx=0),
    )
    assert (batch.number, batch.at, batch.rank, batch.cleared) == (3, 1.5, 0, False)
    assert batch.stored == [Stored([1, b"\x02"], None, 2, "chat", [0, 1, 2, 3])]
    assert batch.removed == [7, 8]


def test_pages_of_sglang_are_joined_to_one_run():
    batch = read(*pages([1, 2, 3], 9, cache_salt="s"), *pages([5], None), removed([4]))
    assert [(one.hashes, one.parent) for one in batch.stored] == [([1, 2, 3], 9), ([5], None)]
    assert batch.stored[0].tokens == [0, 1] * 3
    assert batch.removed == [4]


def test_only_gpu_memory_counts():
    batch = read(
        stored([1], None, medium="CPU"),
        stored([2], None, medium="CPU_PINNED"),
        stored([3], None, medium="DISK"),
        stored([4], None, medium=None),
        removed([1], medium="STORAGE"),
    )
    assert [one.hashes for one in batch.stored] == [[4]]
    assert batch.removed == []


def test_the_first_group_with_full_attention_gives_the_requests():
    batch = read(
        stored([1], None, group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored([2], None, group_idx=1, kv_cache_spec_kind="full_attention"),
        removed([1], group_idx=0),
        removed([2], group_idx=1),
    )
    assert [one.hashes for one in batch.stored] == [[2]]
    assert batch.removed == [2]
    parts = [Part(0, "sliding_window", None, 2, [1]), Part(0, removed=[1])]
    assert batch.parts == parts


def test_all_blocks_cleared():
    assert read({"type": "AllBlocksCleared"}).cleared


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b"x"], "1 frames of \\[1\\] bytes"),
        ([b"", b"\0" * 4, b""], "\\[0, 4, 0\\] bytes"),
        ([b"", b"\0" * 8, b"\xc1"], "message 0 is not KV events"),
        (message(4, 0.0, [["BlockStored", [1]]]), "message 4 is not KV events"),
        (message(4, 0.0, [{"type": "Other"}]), "message 4 is not KV events"),
        (message(4, 0.0, [stored([1], None) | {"token_ids": []}]), "without token ids"),
        (message(4, 0.0, [stored([1], None) | {"block_size": 3}]), "3 tokens with 2 token ids"),
    ],
)
def test_a_message_in_another_form_is_refused(frames, said):
    with pytest.raises(ConfigError, match=said):
        Reader().read(frames)


def test_a_second_topic_is_refused():
    reader = Reader()
    reader.read(message(0, 0.0, [], topic=b"kv@a"))
    with pytest.raises(ConfigError, match="topics b'kv@a' and b'kv@b'"):
        reader.read(message(1, 0.0, [], topic=b"kv@b"))
