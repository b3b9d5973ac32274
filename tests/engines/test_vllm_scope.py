"""Salt, weights, adapters and images keep the KV of vLLM requests apart."""

from types import SimpleNamespace

from kvtrie.engines.vllm.scope import scope_of
from kvtrie.settings.scope import Scope


def request(**more):
    config = {
        "prompt_embeds": None,
        "mm_features": [],
        "cache_salt": None,
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
