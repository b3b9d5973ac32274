"""The weights and adapters that vLLM's requests compute with, in the scheduler's process."""

import os
from types import SimpleNamespace

import pytest

from kvtrie.engines.vllm.identity import Identity

pytestmark = pytest.mark.engine


def saved(folder, content=b"weights", config=b"{}"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def adapter(folder, ident=1, *, inplace=False):
    return SimpleNamespace(
        lora_name="mine",
        lora_int_id=ident,
        lora_path=str(folder),
        load_inplace=inplace,
        is_3d_lora_weight=False,
    )


def request(lora=None):
    return SimpleNamespace(lora_request=lora)


def opened():
    return Identity({0: b"a", 1: b"b"}, slots=8)


def test_adapters_of_one_content_share_and_of_another_do_not(tmp_path):
    first = opened().name(request(adapter(saved(tmp_path / "a"))))
    names = {
        first,
        opened().name(request(adapter(saved(tmp_path / "b"), ident=7))),
    }
    assert names == {first}
    assert first
    names |= {
        opened().name(request(adapter(saved(tmp_path / "c", content=b"weightt")))),
        opened().name(request(adapter(saved(tmp_path / "d", config=b"[]")))),
    }
    assert len(names) == 3


def test_files_that_change_after_loading_are_neither_the_old_adapter_nor_the_new(tmp_path):
    identity, lora = opened(), request(adapter(saved(tmp_path / "a")))
    before = identity.name(lora)
    saved(tmp_path / "a", content=b"WEIGHTS")
    assert identity.name(lora) is None
    # Read again from its files, it is the new one; its old blocks in vLLM's memory are stale.
    again = adapter(tmp_path / "a", inplace=True)
    identity.loaded(again)
    after = identity.name(lora)
    assert after == opened().name(lora) != before
    assert identity.reads_stale(lora, [3])
    assert not identity.reads_stale(request(), [3])
    identity.written([3])
    assert not identity.reads_stale(lora, [3])
    assert identity.reads_stale(lora, [3, 4])
    saved(tmp_path / "a")
    assert identity.name(request(again)) == before


def test_the_name_of_an_adapter_is_logged_without_control_characters(tmp_path, caplog):
    lora = adapter(tmp_path / "none\x1b[2J")
    lora.lora_name = "mine\nforged\x07" * 99
    assert opened().name(request(lora)) is None
    (message,) = caplog.messages
    assert message.isprintable()
    assert len(message) < 1000


def test_an_adapter_that_was_removed_is_read_from_its_files_again(tmp_path):
    identity, lora = opened(), request(adapter(saved(tmp_path / "a")))
    before = identity.name(lora)
    saved(tmp_path / "a", content=b"WEIGHTS")
    identity.removed(1)
    assert identity.name(lora) not in {None, before}


def test_loading_again_without_replacing_changes_nothing(tmp_path):
    identity, lora = opened(), request(adapter(saved(tmp_path / "a")))
    identity.loaded(lora.lora_request)
    before = identity.name(lora)
    saved(tmp_path / "a", content=b"WEIGHTS")
    identity.loaded(lora.lora_request)
    assert identity.name(lora) is None
    saved(tmp_path / "a")
    assert identity.name(lora) == before


def test_an_adapter_whose_files_are_not_here_has_no_name(tmp_path):
    identity = opened()
    assert identity.name(request(adapter(tmp_path / "none"))) is None
    assert identity.name(request(adapter(saved(tmp_path / "here"), ident=2)))
    (tmp_path / "empty").mkdir()
    assert identity.name(request(adapter(tmp_path / "empty", ident=3))) is None


def test_files_are_read_when_their_times_change_only(tmp_path, monkeypatch):
    from kvtrie.engines.vllm import adapters

    read, real = [], adapters.files_digest
    monkeypatch.setattr(adapters, "files_digest", lambda files: read.append(1) or real(files))
    identity, lora = opened(), request(adapter(saved(tmp_path / "a")))
    before = identity.name(lora)
    assert identity.name(lora) == before
    assert len(read) == 1
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    assert identity.name(lora) == before
    assert len(read) == 2


def test_weights_are_settled_once_every_rank_has_answered():
    identity = opened()
    assert identity.settled
    identity.doubt()
    identity.on_answer(0, 0, b"a")  # the answer to an older question
    identity.on_answer(0, 1, b"a")
    assert not identity.settled
    identity.on_answer(1, 1, b"c")
    assert identity.settled
    changed = identity.name(request())
    assert changed
    assert identity.reads_stale(request(), [0])
    identity.doubt()
    identity.on_answer(0, 2, b"a")
    identity.on_answer(1, 2, b"b")
    assert identity.name(request()) == ""
    assert identity.reads_stale(request(), [0])


def test_the_same_weights_leave_everything_as_it_was():
    identity = opened()
    identity.doubt()
    for rank, digest in enumerate((b"a", b"b")):
        identity.on_answer(rank, 1, digest)
    assert identity.name(request()) == ""
    assert not identity.reads_stale(request(), range(8))
