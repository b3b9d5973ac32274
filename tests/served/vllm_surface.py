"""vLLM has all names that kvtrie uses, and the connector overrides all methods that vLLM calls."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import stubs
import vllm

import kvtrie
from kvtrie.engines.server import surface_check
from kvtrie.engines.server.signatures import signature_of
from kvtrie.engines.server.surface_check import missing_names, refused_signatures
from kvtrie.engines.vllm import surface as surface_vllm
from kvtrie.engines.vllm.calls import CALLS, OURS
from kvtrie.engines.vllm.surface import SINCE, VERSIONS

MINOR = ".".join(vllm.__version__.split(".")[:2])
LACKING = frozenset().union(
    *(names for version, names in SINCE.items() if VERSIONS.index(version) > VERSIONS.index(MINOR))
)
"""Names that this version lacks or calls otherwise, and that kvtrie does without."""


def test_this_version_lacks_exactly_the_listed_names():
    assert missing_names(surface_vllm) | set(refused_signatures(surface_vllm)) == LACKING


def called(module, name):
    """The callables that the list names of a class, or of a module if the class is ""."""
    if f"{module}.{name}" in LACKING:
        return set()
    owner = import_module(module)
    if not name:
        names = [each for home, each in surface_vllm.NAMES if home == module]
    else:
        owner, names = getattr(owner, name), surface_vllm.USED[module, name]
    return {each for each in names if signature_of(owner, each) is not None}


@pytest.mark.parametrize(
    ("module", "name"),
    [*surface_vllm.USED, *dict.fromkeys((module, "") for module, _ in surface_vllm.NAMES)],
)
def test_each_listed_call_has_its_arguments(module, name):
    calls = set(CALLS.get((module, name), ()))
    if (module, name) in OURS:
        ours, kind = OURS[module, name]
        calls |= set(vars(getattr(import_module(ours), kind)))
    if name == "EngineCore":  # `watch` passes on whatever arguments come
        calls |= set(surface_vllm.USED[module, name])
    assert called(module, name) <= calls


def test_a_changed_signature_is_refused(monkeypatch):
    from vllm.v1.kv_offload.base import TransferResult
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    def touch(self, keys, req_context, now):
        raise NotImplementedError(self, keys, req_context, now)

    def made(self, job_id, *, ok):
        raise NotImplementedError(self, job_id, ok)

    monkeypatch.setattr(CachePolicy, "touch", touch)
    monkeypatch.setattr(TransferResult, "__init__", made)
    assert set(refused_signatures(surface_vllm)) - LACKING == {
        "vllm.v1.kv_offload.cpu.policies.base.CachePolicy.touch",
        "vllm.v1.kv_offload.base.TransferResult.__init__",
    }


def test_the_connector_overrides_exactly_the_listed_methods():
    from kvtrie.engines.vllm import KvtrieConnector

    base = KvtrieConnector.__mro__[1]
    own = {name for name in vars(KvtrieConnector) if hasattr(base, name)}
    own = {name for name in own if not name.startswith("__") and not name.startswith("_abc")}
    lacking = {name.rpartition(".")[2] for name in LACKING}
    assert own == set(surface_vllm.OVERRIDDEN) - lacking


def test_an_unknown_version_warns_of_missing_names(monkeypatch):
    from kvtrie.engines.vllm import KvtrieConnector

    lines = []
    # Servers that other tests start set the level of vLLM's loggers.
    log = SimpleNamespace(warning=lambda line, *values: lines.append(line % values))
    monkeypatch.setattr(surface_check, "logging", SimpleNamespace(getLogger=lambda _: log))
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.delattr("vllm.v1.kv_cache_interface.MLAAttentionSpec")
    assert kvtrie.engines.vllm.KvtrieConnector is KvtrieConnector
    (line,) = lines
    assert "0.99.1" in line
    assert "vllm.v1.kv_cache_interface.MLAAttentionSpec" in line


@pytest.mark.skipif(VERSIONS[-1] != MINOR, reason="the stubs are those of the newest version")
def test_the_stubs_are_what_is_installed():
    assert stubs.committed("vllm") == stubs.written("vllm")


def test_every_module_of_a_server_takes_the_transformers_that_vllm_takes():
    assert tuple(map(int, version("transformers").split(".")[:2])) < (5, 20)
    for package in ("engines.vllm", "engines.server", "engines.identity", "cli.launch"):
        home = import_module(f"kvtrie.{package}")
        for each in pkgutil.iter_modules(home.__path__):
            assert import_module(f"kvtrie.{package}.{each.name}")
