"""RemoteStorage: names and proofs of blocks in a store that others read, write and break."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shelf import SHAPE, SIZE, TOKENS, Shelf, kv, labelled, storage_of

from kvtrie import BlockManager, ConfigError, Layout, ModelShape, Scope, Tier, TransferError
from kvtrie.tiers import open_pools
from kvtrie.tiers.remote import RemoteStorage, RemoteUrl


def test_a_block_is_read_as_it_was_written_by_another_process():
    store = Shelf()
    keys, labels = labelled(TOKENS)
    writer, reader = storage_of(store), storage_of(store)
    blocks = [kv(1), kv(2)]
    writes = [
        (key, 7, (0, 3), kv, label) for key, kv, label in zip(keys, blocks, labels, strict=True)
    ]
    assert writer.write_many(writes) == [None, None]
    found = [torch.empty_like(block) for block in blocks]
    assert reader.read_many(
        [(key, 0, (0, 3), at) for key, at in zip(keys, found, strict=True)]
    ) == [
        None,
        None,
    ]
    assert all(map(torch.equal, found, blocks))
    part = torch.empty_like(blocks[0][1:])
    reader.read(keys[0], 3, (1, 3), part)
    assert torch.equal(part, blocks[0][1:])
    stats = reader.stats()
    assert stats.results == {("get", "ok"): 3}
    assert stats.bytes_read == 2 * blocks[0].nbytes + part.nbytes
    assert writer.stats().bytes_written == 2 * blocks[0].nbytes
    writer.close()
    writer.close()
    assert writer.read_many([(keys[0], 0, (0, 3), found[0])]) == ["unreachable: closed"]


@pytest.mark.parametrize("secret", [None, b"deployment"])
def test_a_changed_byte_is_a_counted_miss_and_the_value_is_removed(secret):
    store = Shelf()
    keys, labels = labelled(TOKENS)
    storage = storage_of(store, secret=secret)
    storage.write(keys[0], 0, (0, 3), kv(1), labels[0])
    ((name, value),) = store.values.items()
    out = kv(0)
    for at in (0, 30, 50, 90, len(value) - 1):
        store.values[name] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        with pytest.raises(TransferError, match="damaged: "):
            storage.read(keys[0], 0, (0, 3), out)
        assert not store.values
        storage.write(keys[0], 0, (0, 3), kv(1), labels[0])
        assert store.values == {name: value}
    assert storage.stats().results["get", "damaged"] == 5
    assert storage.stats().refuted == 5


def test_a_value_under_another_name_is_a_miss():
    store = Shelf()
    keys, labels = labelled(TOKENS)
    storage = storage_of(store)
    for key, label, seed in zip(keys, labels, (1, 2), strict=True):
        storage.write(key, 0, (0, 3), kv(seed), label)
    first, second = store.values
    store.values[first], store.values[second] = store.values[second], store.values[first]
    answers = storage.read_many([(key, 0, (0, 3), kv(0)) for key in keys])
    assert answers == ["damaged: name of another block"] * 2


def test_a_secret_is_needed_to_read_and_an_unsigned_value_is_refused():
    store = Shelf()
    keys, labels = labelled(TOKENS)
    secret, other = storage_of(store, secret=b"ours"), storage_of(store, secret=b"theirs")
    plain = storage_of(store)
    plain.write(keys[0], 0, (0, 3), kv(1), labels[0])
    for storage in (secret, other):
        assert storage.read_many([(keys[0], 0, (0, 3), kv(0))]) == ["missing: "]
    (forged,) = store.values.values()
    store.values[secret._names([keys[0]])[0]] = forged
    assert secret.read_many([(keys[0], 0, (0, 3), kv(0))]) == ["damaged: checksum kind 1, not 2"]
    assert "ours" not in repr(secret.form) + str(vars(secret))


@pytest.mark.parametrize(
    ("model", "settings", "scope"),
    [
        (SHAPE, {}, Scope(tenant=b"another")),
        (SHAPE, {}, Scope(lora="another")),
        (SHAPE, {"layout": Layout(dtype="float16")}, None),
        (SHAPE, {"layout": Layout(rope="plain")}, None),
        (SHAPE, {"rank": 1, "ranks": 2}, None),
        (SHAPE, {"rank": 0, "ranks": 2}, None),
        (ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="other"), {}, None),
    ],
)
def test_blocks_of_another_meaning_are_not_found(model, settings, scope):
    store = Shelf()
    keys, labels = labelled(TOKENS)
    storage_of(store).write(keys[0], 0, (0, 3), kv(1), labels[0])
    others, _ = labelled(TOKENS, model, scope)
    storage = storage_of(store, model=model, **settings)
    found = storage.find(np.frombuffer(others[0], np.uint8).reshape(1, 32), 2**62)
    assert found == (0, 1, 0, 0)


def test_latent_kv_is_shared_by_all_ranks():
    model = ModelShape(layers=3, kv_heads=1, head_dim=8, latent=True, fingerprint="latent")
    names = {
        storage_of(Shelf(), model=model, rank=rank, ranks=2)._names([bytes(32)])[0]
        for rank in range(2)
    }
    assert len(names) == 1


def test_a_part_of_a_block_is_not_stored():
    store = Shelf()
    keys, labels = labelled(TOKENS)
    storage = storage_of(store)
    answers = storage.write_many([(keys[0], 0, (1, 3), kv(1, layers=2), labels[0])])
    assert answers == ["refused: only whole blocks are stored"]
    assert not store.values


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/mnt/kv", "folder:/mnt/kv"),
        ("folder:", "names no folder"),
        ("folder://host/kv", "names no folder"),
        ("folder:/kv?size=3", "no option 'size'"),
        ("folder:/kv?ttl=3&ttl=4", "names an option twice"),
        ("folder:/kv?ttl=soon", "'soon'"),
        ("folder:/kv?ttl=0", r"0\.0, 1\.0 to"),
        ("folder:/kv?io=fast", "io of folder: is one of direct, buffered, not 'fast'"),
        ("folder:/kv?strict=yes", "'yes', 0 or 1 wanted"),
        ("ftp://user:word@host/kv", "unknown scheme, one of .*folder:"),
        ("redis://:word@host:many/0", "host:many"),
    ],
)
def test_a_bad_url_is_one_clear_error_without_its_password(url, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as raised:
        RemoteStorage(url, SHAPE, SIZE)
    assert "word" not in str(raised.value)


def test_a_password_is_in_no_text():
    url = RemoteUrl.parse("path", "redis://me:hunter2@host:1/0?strict=1")
    assert (url.user, url.password, url.strict) == ("me", "hunter2", True)
    tier = Tier("remote", blocks=1, path="redis://me:hunter2@host:1/0")
    for text in (str(url), repr(url), repr(tier)):
        assert "hunter2" not in text
        assert "host" in text
    assert str(url) == "redis://me:***@host:1/0?strict=1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "host", "path": "redis://host"}, "redis:// is not supported"),
        ({"kind": "disk", "path": "folder:/kv"}, "folder: is for tier 'remote'"),
        ({"path": "/mnt/kv"}, "'folder:/mnt/kv' is a folder"),
        ({"workers": 0}, "workers of tier 'remote' is 0, 1 to"),
        ({"kind": "host", "workers": 2}, "only a disk or remote tier"),
        ({"kind": "disk", "trust_s": 2}, "trust_s is given of tier 'disk'"),
        ({"kind": "disk", "write_limit": "1GB"}, "write_limit is given of tier 'disk'"),
        ({"kind": "host", "lookup": "all"}, "lookup is given of tier 'host'"),
        ({"kind": "gpu", "secret_file": "x"}, "secret_file is given of tier 'gpu'"),
        ({"trust_s": 0}, "trust_s of tier 'remote' is 0, above 0 wanted"),
        ({"trust_s": float("inf")}, "trust_s of tier 'remote' is inf"),
        ({"write_limit": 0}, "write_limit of tier 'remote' is 0"),
        ({"lookup": "some"}, "lookup of tier 'remote' is one of all, local, not 'some'"),
    ],
)
def test_a_tier_refuses_what_cannot_be(settings, said):
    with pytest.raises(ConfigError, match=said):
        Tier(**{"kind": "remote", "blocks": 4, **settings})


def test_a_secret_file_has_a_secret(tmp_path):
    file = tmp_path / "secret"
    tiers = [
        Tier("host", blocks=4),
        Tier("remote", blocks=4, path=f"folder:{tmp_path}/kv", secret_file=file),
    ]
    with pytest.raises(ConfigError, match="secret: No such file"):
        open_pools(SHAPE, tiers, SIZE)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="secret is empty"):
        open_pools(SHAPE, tiers, SIZE)
    file.write_text("hunter2\n")
    assert isinstance(open_pools(SHAPE, tiers, SIZE)[1], RemoteStorage)


def test_a_remote_tier_without_a_path_is_the_callers():
    tiers = [Tier("host", blocks=4), Tier("remote", blocks=4)]
    assert open_pools(SHAPE, tiers, SIZE)[1] is None


def test_a_model_without_a_fingerprint_has_no_store(tmp_path):
    with pytest.raises(ConfigError, match="fingerprint"):
        RemoteStorage(f"folder:{tmp_path}", ModelShape(2, 2, 4), SIZE)
    with pytest.raises(ConfigError, match="rank is 2, 0 to 1 wanted"):
        RemoteStorage(f"folder:{tmp_path}", SHAPE, SIZE, rank=2, ranks=2)
    with pytest.raises(ConfigError, match="fingerprint"):
        BlockManager(ModelShape(2, 2, 4), [Tier("gpu", blocks=1)]).keys([1])
