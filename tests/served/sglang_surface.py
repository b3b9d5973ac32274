"""SGLang has all names that kvtrie uses, our classes override its calls, and stubs are true."""

from __future__ import annotations

from importlib import import_module

import pytest
import stubs

import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load
from kvtrie.engines.server import surface_check
from kvtrie.engines.server.signatures import signature_of
from kvtrie.engines.sglang import KvtrieHiCache, KvtrieRadixCache
from kvtrie.engines.sglang import surface as surface_sglang

OURS = dict(zip(surface_sglang.OVERRIDDEN, (KvtrieRadixCache, KvtrieHiCache), strict=True))


def test_all_names_are_there_and_all_signatures_fit():
    assert surface_check.missing_names(surface_sglang) == set()
    assert surface_check.refused_signatures(surface_sglang) == {}


def test_a_changed_signature_is_in_the_warning_at_start(monkeypatch):
    def match(self, params, now):
        raise NotImplementedError(self, params, now)

    base = import_module("sglang.srt.mem_cache.radix_cache").RadixCache
    assert surface_check.warn(surface_sglang, "0.5.23.post1") is None
    monkeypatch.setattr(base, "match_prefix", match)
    monkeypatch.delattr("sglang.srt.runtime_context.get_lora")
    line = surface_check.warn(surface_sglang, "0.5.24")
    assert "SGLang 0.5.24 is not one of the tested versions, 0.5.23; it lacks 1 names" in line
    assert "RadixCache.match_prefix called as (params, now), kvtrie has (params)" in line


@pytest.mark.parametrize(("module", "name"), OURS)
def test_our_classes_override_exactly_the_listed_methods(module, name):
    base, ours = getattr(import_module(module), name), OURS[module, name]
    assert issubclass(ours, base)
    kinds = ours.__mro__[: ours.__mro__.index(base)]
    own = {each for kind in kinds for each in vars(kind) if hasattr(base, each)}
    own = {each for each in own if each == "__init__" or not each.startswith("_")}
    assert own == set(surface_sglang.OVERRIDDEN[module, name])


@pytest.mark.parametrize(
    ("module", "name"),
    [*surface_sglang.USED, *dict.fromkeys((module, "") for module, _ in surface_sglang.NAMES)],
)
def test_each_listed_call_has_its_arguments(module, name):
    owner = getattr(import_module(module), name) if name else import_module(module)
    calls = surface_sglang.CALLS.get((module, name), {})
    names = surface_sglang.USED.get((module, name), ())
    names = names or [each for home, each in surface_sglang.NAMES if home == module]
    called = {each for each in names if signature_of(owner, each) is not None}
    assert called <= {*calls, *surface_sglang.OVERRIDDEN.get((module, name), ())}


def test_the_stubs_are_what_is_installed():
    assert stubs.committed("sglang") == stubs.written("sglang")
