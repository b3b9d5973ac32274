"""Salt, weights, adapters and images keep the KV of vLLM requests apart."""

from types import SimpleNamespace

from kvtrie.engines.server.tenant import Sharing, signed
from kvtrie.engines.vllm.scope import scope_of
from kvtrie.settings.scope import Scope


def request(**more):
    config = {
        "prompt_embeds": None,
        "mm_features": [],
        "cache_salt": None,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**(config | more))


def test_salt_identity_and_images_part_requests():
    def image(at, name):
        content = None if name is None else name.encode()
        place = SimpleNamespace(offset=at)
        return SimpleNamespace(identifier="same", mm_position=place, kvtrie_content=content)

    scopes = [
        scope_of(request(), ""),
        scope_of(request(cache_salt="s"), ""),
        scope_of(request(), "other weights or an adapter"),
        scope_of(request(mm_features=[image(3, "x")]), ""),
        scope_of(request(mm_features=[image(3, "y")]), ""),
        scope_of(request(mm_features=[image(4, "x")]), ""),
        scope_of(request(mm_features=[image(3, "x"), image(3, "y")]), ""),
    ]
    assert scopes[0] == Scope()
    assert len(set(scopes)) == len(scopes)
    assert scope_of(request(prompt_embeds=object()), "") is None
    assert scope_of(request(mm_features=[image(3, "x"), image(4, None)]), "") is None
    assert scope_of(request(), None) is None


def test_tenants_that_share_are_those_that_a_front_end_signed():
    sharing = Sharing(3, b"secret")
    params = {"kvtrie": signed("acme", b"secret")}
    shared = Scope(tenant=b"acme", lora="w", share_after=3)
    assert scope_of(request(kv_transfer_params=params), "w", sharing) == shared
    # A salt of vLLM's own cache changes nothing, and names nothing.
    salted = request(kv_transfer_params=params, cache_salt="s")
    assert scope_of(salted, "w", sharing) == shared
    assert scope_of(salted, "w") == Scope(tenant=b"s", lora="w")
    assert scope_of(request(cache_salt="acme"), "w", sharing) == Scope(tenant=b"acme", lora="w")
    forged = {"kvtrie": signed("acme", b"another")}
    assert scope_of(request(kv_transfer_params=forged), "w", sharing) is None
