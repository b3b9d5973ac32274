"""Accounts that a front end signs share what enough of them have computed, and nothing before."""

from __future__ import annotations

import pytest
import servers
from servers import BLOCK, prompt, same, serve

from kvtrie.engines.server.tenant import salt_of, signed

SECRET = b"of the front end"
SYSTEM = prompt(0, 8 * BLOCK)
PROMPTS = [prompt(seed, 2 * BLOCK + 5, after=SYSTEM) for seed in (1, 2)]
FOUND = {1: 8 * BLOCK, 2: 8 * BLOCK}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    """Answers of a server without us."""
    with serve(model) as server:
        return server.answers(PROMPTS)


@pytest.fixture
def extra(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    tiers = [
        {"kind": "host", "blocks": 64},
        {"kind": "disk", "blocks": 512, "path": str(tmp_path / "kv")},
    ]
    return {"tiers": tiers, "share_after": 3, "secret_file": str(secret)}


def found(server, wanted, number, *, fields=None, salt=None, which=0):
    """Tokens that a request of an account finds below vLLM's own cache; its answer is right."""
    name = f"account {number}"
    own = signed(name, SECRET) if fields is None else fields
    salt = salt_of(name, SECRET) if salt is None else salt
    server.forget()
    args = {"kv_transfer_params": {"kvtrie": own}}
    same(server.answers([PROMPTS[which]], salt=salt, extra_args=args), [wanted[which]])
    server.wait_for_stores()
    return server.found


def test_accounts_share_what_three_of_them_have_computed(model, wanted, extra):
    whole = len(PROMPTS[0]) // BLOCK * BLOCK
    with serve(model, extra) as server:
        # An account finds its own, and counts once.
        assert [found(server, wanted, 0) for _ in range(2)] == [0, whole]
        assert found(server, wanted, 1, which=1) == 0
        assert [found(server, wanted, 2) for _ in range(2)] == [0, whole]
        # The system prompt is shared now, and the rest of no prompt is.
        assert found(server, wanted, 3, which=1) == len(SYSTEM)
        assert found(server, wanted, 4) == len(SYSTEM)
        assert found(server, wanted, 5) == whole
        server.check()
    with serve(model, extra) as server:
        assert found(server, wanted, 6, which=1) == len(SYSTEM)
        assert found(server, wanted, 1, which=1) == whole
        assert server.kv_scheduler.cache.counters.tokens["disk"] > 0
        server.check()


def test_a_client_names_no_tenant(model, wanted, extra):
    with serve(model, extra | {"share_after": 2}) as server:
        for number in (0, 1):
            found(server, wanted, number)
        whole = found(server, wanted, 2)
        assert whole > 0
        lost = server.kv_scheduler.cache.counters.lost
        strangers = [
            {},
            {"tenant": "account 0"},
            signed("account 0", b"another secret"),
            {**signed("account 0", SECRET), "tenant": "account 1"},
        ]
        for fields in strangers:
            assert found(server, wanted, 7, fields=fields, salt="account 0") in {0, whole}
        # By its salt such a request finds what the first of them computed, and no tenant does.
        assert lost["a request without a signed tenant"] == len(strangers)
        assert found(server, wanted, 8, fields={}, salt="another") == 0
        # A salt that is a signed account's names nothing of it.
        assert found(server, wanted, 9, fields={}, salt="kvtrie share_after") == 0
        server.check()


def test_events_leave_shared_blocks_out(model, wanted, extra):
    with serve(model, extra | {"events": True}) as server:
        found(server, wanted, 0)
        assert not server.kv_scheduler.cache.published._shown
        server.check()
