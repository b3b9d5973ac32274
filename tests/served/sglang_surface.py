"""SGLang has all names that kvtrie uses, our classes override its calls, and stubs are true."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import stubs
import surface_sglang
from stub_module import members

import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load
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
    for each in surface_sglang.OVERRIDDEN[module, name]:
        if each != "__init__":
            wanted = set(inspect.signature(getattr(base, each)).parameters)
            assert wanted <= set(inspect.signature(getattr(ours, each)).parameters), each


def test_the_stubs_are_what_is_installed():
    assert stubs.committed("sglang") == stubs.written("sglang")
