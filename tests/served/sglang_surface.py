"""SGLang has all names that kvtrie uses, our classes override its calls, and stubs are true."""

from __future__ import annotations

from importlib import import_module

import pytest
import stubs
import surface_sglang
from stub_module import members

import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load
from kvtrie.engines.server.signatures import refused_calls, refused_overrides, signature_of
from kvtrie.engines.sglang import KvtrieHiCache, KvtrieRadixCache

OURS = dict(zip(surface_sglang.OVERRIDDEN, (KvtrieRadixCache, KvtrieHiCache), strict=True))


@pytest.mark.parametrize(("module", "name"), surface_sglang.USED)
def test_it_is_there(module, name):
    kind = getattr(import_module(module), name)
    missing = set(surface_sglang.USED[module, name]) - members(kind)
    assert not missing


@pytest.mark.parametrize(("module", "name"), surface_sglang.NAMES)
def test_a_name_is_there(module, name):
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize(("module", "name"), OURS)
def test_our_classes_override_exactly_the_listed_methods(module, name):
    base, ours = getattr(import_module(module), name), OURS[module, name]
    assert issubclass(ours, base)
    kinds = ours.__mro__[: ours.__mro__.index(base)]
    own = {each for kind in kinds for each in vars(kind) if hasattr(base, each)}
    own = {each for each in own if each == "__init__" or not each.startswith("_")}
    assert own == set(surface_sglang.OVERRIDDEN[module, name])


@pytest.mark.parametrize(("module", "name"), OURS)
def test_a_signature_takes_what_sglang_gives(module, name):
    base, ours = getattr(import_module(module), name), OURS[module, name]
    assert refused_overrides(ours, base, surface_sglang.OVERRIDDEN[module, name]) == {}


@pytest.mark.parametrize(
    ("module", "name"),
    [*surface_sglang.USED, *dict.fromkeys((module, "") for module, _ in surface_sglang.NAMES)],
)
def test_sglang_takes_what_kvtrie_gives(module, name):
    owner = getattr(import_module(module), name) if name else import_module(module)
    calls = surface_sglang.CALLS.get((module, name), {})
    assert refused_calls(owner, calls) == {}
    names = surface_sglang.USED.get((module, name), ())
    names = names or [each for home, each in surface_sglang.NAMES if home == module]
    called = {each for each in names if signature_of(owner, each) is not None}
    assert called <= {*calls, *surface_sglang.OVERRIDDEN.get((module, name), ())}


def test_the_stubs_are_what_is_installed():
    assert stubs.committed("sglang") == stubs.written("sglang")
