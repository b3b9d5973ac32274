"""vLLM has all names that kvtrie uses, and the connector overrides all methods that vLLM calls."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
import stubs
import vllm

import kvtrie
from kvtrie.engines.vllm import surface as surface_vllm
from kvtrie.engines.vllm import version_check
from kvtrie.engines.vllm.surface import SINCE, VERSIONS, missing_names

MINOR = ".".join(vllm.__version__.split(".")[:2])
LACKING = frozenset().union(
    *(names for version, names in SINCE.items() if VERSIONS.index(version) > VERSIONS.index(MINOR))
)
"""Names that this version lacks, and that kvtrie does without."""


def test_this_version_lacks_exactly_the_listed_names():
    assert missing_names() == LACKING


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
    monkeypatch.setattr(version_check, "_LOG", log)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.delattr("vllm.v1.kv_cache_interface.MLAAttentionSpec")
    assert kvtrie.engines.vllm.KvtrieConnector is KvtrieConnector
    (line,) = lines
    assert "0.99.1" in line
    assert "vllm.v1.kv_cache_interface.MLAAttentionSpec" in line


def test_a_signature_takes_what_vllm_gives():
    from kvtrie.engines.vllm import KvtrieConnector

    base = KvtrieConnector.__mro__[1]
    for name in surface_vllm.OVERRIDDEN:
        ours, theirs = getattr(KvtrieConnector, name), getattr(base, name, None)
        if not callable(ours) or theirs is None:
            continue
        wanted = inspect.signature(theirs).parameters.values()
        kinds = {one.kind for one in inspect.signature(ours).parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            continue
        taken = set(inspect.signature(ours).parameters)
        assert {one.name for one in wanted} <= taken, name


@pytest.mark.skipif(VERSIONS[-1] != MINOR, reason="the stubs are those of the newest version")
def test_the_stubs_are_what_is_installed():
    assert stubs.committed("vllm") == stubs.written("vllm")


@pytest.mark.next
@pytest.mark.parametrize(("module", "name"), surface_vllm.USED)
def test_it_is_in_the_next_version(sources, module, name):
    there = sources.members(module, name)
    assert there is not None
    assert not set(surface_vllm.USED[module, name]) - there


@pytest.mark.next
@pytest.mark.parametrize(("module", "name"), surface_vllm.NAMES)
def test_a_name_is_in_the_next_version(sources, module, name):
    assert name in ast.unparse(sources.tree(module))


@pytest.mark.next
def test_a_missing_name_has_no_members(sources):
    assert sources.members("vllm.v1.request", "Requests") is None
    assert "no_such_field" not in sources.members("vllm.v1.request", "Request")


@pytest.mark.next
def test_the_next_version_calls_what_we_override(sources):
    """Arguments that the next version's base class names are taken by ours."""
    from kvtrie.engines.vllm import KvtrieConnector

    base = KvtrieConnector.__mro__[1]
    _, node = sources.find(base.__module__, base.__name__)
    wanted = {
        each.name: {argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)}
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }
    for name in surface_vllm.OVERRIDDEN:
        ours = getattr(KvtrieConnector, name)
        if callable(ours):
            taken = inspect.signature(ours).parameters.values()
            if inspect.Parameter.VAR_POSITIONAL not in {one.kind for one in taken}:
                assert wanted[name] - {"self", "cls"} <= {one.name for one in taken}, name
