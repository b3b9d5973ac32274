"""A version of an engine that is not tested warns, with the names that it lacks."""

import logging
import sys
from types import ModuleType

import pytest

from kvtrie.engines.server import surface_check
from kvtrie.engines.vllm import surface
from kvtrie.errors import ConfigError


@pytest.fixture
def other_vllm(monkeypatch):
    """A package of this version with one module and one class, and a list of names."""

    def made(version, used=(), connector=lambda: type("Connector", (), {}), calls={}):  # noqa: B006
        vllm, part, ours = ModuleType("vllm"), ModuleType("vllm.part"), ModuleType("ours")
        vllm.__version__ = version
        part.Kind = type("Kind", (), {"__annotations__": {"field": int}, "method": None})
        ours.__getattr__ = lambda _: connector()
        for module in (vllm, part, ours):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(surface, "USED", {("vllm.part", "Kind"): ("field", "method", *used)})
        monkeypatch.setattr(surface, "NAMES", (("vllm", "__version__"),))
        monkeypatch.setattr(surface, "CALLS", calls)
        monkeypatch.setattr(surface, "OURS", {})
        monkeypatch.setattr(surface_check, "_WARNED", set())
        return surface_check.load_class(surface, version, "ours", "Connector")

    return made


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm.kvtrie"), "propagate", True)
    return caplog


@pytest.mark.parametrize("version", [*(f"{one}.3" for one in surface.VERSIONS), "0.32.1rc2+cpu"])
def test_a_tested_version_warns_of_nothing(other_vllm, warnings, version):
    assert other_vllm(version, ["gone"]).__name__ == "Connector"
    assert not warnings.records


def test_a_newer_version_with_all_names_warns_of_its_number(other_vllm, warnings):
    assert other_vllm("0.99.0").__name__ == "Connector"
    (record,) = warnings.records
    assert record.getMessage() == (
        "kvtrie: vLLM 0.99.0 is not one of the tested versions, 0.30 to 0.33; "
        "it has all names and signatures that kvtrie uses"
    )


def test_a_newer_version_warns_of_missing_names(other_vllm, warnings):
    assert other_vllm("0.99.0", ["gone", "left"]).__name__ == "Connector"
    (record,) = warnings.records
    names = "vllm.part.Kind.gone, vllm.part.Kind.left"
    assert record.getMessage().endswith(f"it lacks 2 names that kvtrie uses: {names}")


def test_a_newer_version_warns_of_changed_signatures(other_vllm, warnings):
    calls = {("vllm.part", "Kind"): {"__init__": "tokens, size="}, ("vllm.part", ""): {}}
    assert other_vllm("0.99.0", calls=calls).__name__ == "Connector"
    (record,) = warnings.records
    assert record.getMessage().endswith(
        "it has 1 signatures that kvtrie does not fit: "
        "vllm.part.Kind.__init__ is (), kvtrie gives (tokens, size=)"
    )


def test_a_version_without_a_needed_name_is_refused_with_the_list(other_vllm):
    with pytest.raises(ConfigError, match=r"vLLM 1\.0\.0 is not .* vllm\.part\.Kind\.gone"):
        other_vllm("1.0.0", ["gone"], lambda: sys.modules["vllm.part"].Gone)


def test_names_of_a_later_version_are_listed_names():
    classes = {f"{module}.{name}" for module, name in (*surface.USED, *surface.NAMES)}
    for version, names in surface.SINCE.items():
        assert version in surface.VERSIONS[1:]
        for name in names:
            kind, _, member = name.rpartition(".")
            assert name in classes or member in surface.USED[tuple(kind.rsplit(".", 1))], name
