"""Signed tenants share blocks of host memory and disk over the engine that compares all bytes."""

from __future__ import annotations

import random

import pytest
from tests.engines.vllm_blocks import SIZE
from tests.engines.vllm_engine import make_engine

from kvtrie.engines.server.tenant import salt_of, signed

SECRET = b"of the front end"
PROMPT = list(range(3 * SIZE + 1))


@pytest.fixture
def sharing(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    return {"folder": tmp_path / "kv", "share_after": 3, "secret_file": str(secret)}


def found(engine, number, tokens, *, fields=None, salt=None):
    """Blocks that a request of an account finds; the engine compares their bytes."""
    name, before = f"account {number}", engine.found
    engine.add(f"{number} {len(engine.seen)}", tokens, 1)
    request = engine.seen[-1]
    request.kv_transfer_params = {"kvtrie": signed(name, SECRET) if fields is None else fields}
    request.cache_salt = salt_of(name, SECRET) if salt is None else salt or None
    engine.drain()
    return (engine.found - before) // SIZE


def test_accounts_share_what_three_of_them_have_computed(sharing):
    engine = make_engine(**sharing)
    assert [found(engine, number, PROMPT) for number in (0, 0, 1, 2, 3)] == [0, 3, 0, 0, 3]
    assert found(engine, 4, [*PROMPT[: 2 * SIZE], *range(50, 60)]) == 2
    engine.scheduler.manager.audit()
    engine.close()
    again = make_engine(**sharing)
    assert found(again, 5, PROMPT) == 3
    again.close()


def test_a_client_names_no_tenant(sharing):
    engine = make_engine(**sharing)
    for number in range(3):
        found(engine, number, PROMPT)
    lost = engine.scheduler.cache.counters.lost
    forged = {**signed("account 0", SECRET), "tenant": "account 9"}
    for fields in ({}, forged, signed("account 0", b"another")):
        assert [found(engine, 9, PROMPT, fields=fields, salt="") for _ in range(2)] == [0, 0]
    assert lost["a request without a signed tenant"] == 6
    salted = [found(engine, 9, PROMPT, fields={}, salt=salt) for salt in ("a", "a", "account 0")]
    assert salted == [0, 3, 0]
    assert found(engine, 9, PROMPT, fields={}, salt="kvtrie share_after") == 0
    assert found(engine, 9, PROMPT) == 3
    engine.close()


def test_random_accounts_find_what_they_may(sharing):
    engine, draw, producers, every = make_engine(host=40, **sharing), random.Random(5), {}, 0
    for _ in range(60):
        number, prompt = draw.randrange(5), []
        for _ in range(3):
            prompt += [draw.randrange(2)] * SIZE
        paths = [tuple(prompt[: at * SIZE]) for at in (1, 2, 3)]
        known = [producers.setdefault(path, set()) for path in paths]
        may = (*(number in them or len(them) >= 3 for them in known), False).index(False)
        # A salt of vLLM's own cache decides nothing.
        assert found(engine, number, [*prompt, 7], salt="one") == may
        for them in known[may:]:
            them.add(number)
        every += may
    assert every > 50
    engine.close()
