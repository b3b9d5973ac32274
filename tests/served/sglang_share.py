"""Accounts that a front end signs share pages of SGLang's memory once enough have computed them."""

from __future__ import annotations

import random
from array import array

from benches.peers.stand_ins import Pool  # isort: skip - without it sglang does not load

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang_hostile import BLOCKS, PAGE, Rows, serve

from kvtrie.engines.server.tenant import extra_key_of
from kvtrie.engines.sglang import KvtrieRadixCache
from kvtrie.errors import ConfigError

SECRET = b"of the front end"


def make_cache(folder, after=3, **more):
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    pool = Pool(BLOCKS)
    params = CacheInitParams(
        disable=False, req_to_token_pool=Rows(), token_to_kv_pool_allocator=pool, page_size=PAGE,
        **more,
    )  # fmt: skip
    made = KvtrieRadixCache(params, blocks=BLOCKS, share_after=after, secret_file=str(secret))
    return made, pool


def prompt(*pages):
    return array("q", [page for page in pages for _ in range(PAGE)])


def found(cache, pool, number, ids, adapter=""):
    length = serve(cache, pool, ids, extra_key_of(f"account {number}", SECRET) + adapter)
    assert cache.protected_size() == 0
    assert pool.free_blocks * PAGE + cache.total_size() == BLOCKS * PAGE
    return length // PAGE


@pytest.mark.usefixtures("page_hashes")
def test_accounts_share_what_three_of_them_have_computed(tmp_path):
    cache, pool = make_cache(tmp_path, enable_kv_cache_events=True)
    one, two = prompt(1, 2, 3), prompt(1, 2, 4)
    assert [found(cache, pool, 0, one) for _ in range(2)] == [0, 3]
    assert [found(cache, pool, 1, two) for _ in range(2)] == [0, 3]
    assert found(cache, pool, 2, one) == 0
    assert [found(cache, pool, number, one) for number in (3, 4)] == [2, 3]
    assert found(cache, pool, 5, one, "an adapter") == 0
    assert cache.total_size() == 7 * PAGE  # one copy of each
    assert [type(each).__name__ for each in cache.take_events()] == ["AllBlocksCleared"]
    cache.evict(EvictParams(num_tokens=BLOCKS * PAGE))
    assert found(cache, pool, 4, one) == 0


def test_requests_without_a_signature_share_by_their_salt_alone(tmp_path):
    cache, pool = make_cache(tmp_path)
    ids = prompt(1, 2)
    for number in range(3):
        found(cache, pool, number, ids)
    forged = extra_key_of("account 0", b"another")
    assert [serve(cache, pool, ids, key) for key in (None, "account 0", forged) * 2] == [0] * 6
    salted = [serve(cache, pool, ids, None, salt) // PAGE for salt in ("a", "a", "b")]
    assert salted == [0, 2, 0]


def test_random_accounts_find_what_they_may(tmp_path):
    cache, pool = make_cache(tmp_path)
    draw = random.Random(3)
    producers, every = {}, 0
    for _ in range(400):
        number, ids = draw.randrange(6), prompt(*(draw.randrange(2) for _ in range(3)))
        paths = [bytes(ids[: at * PAGE]) for at in (1, 2, 3)]
        known = [producers.setdefault(path, set()) for path in paths]
        allowed = [number in them or len(them) >= 3 for them in known]
        may = (*allowed, False).index(False)
        got = found(cache, pool, number, ids)
        assert got == may
        for them in known[got:]:
            them.add(number)
        every += got
    assert every > 400
    cache.manager.audit()


def test_sharing_needs_a_secret():
    with pytest.raises(ConfigError, match="without secret_file"):
        KvtrieRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=Rows(), token_to_kv_pool_allocator=Pool(4),
                page_size=PAGE,
            ),
            blocks=4,
            share_after=2,
        )  # fmt: skip
