"""Plug-ins for vLLM and SGLang register names and import nothing heavy."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.mark.parametrize(
    ("group", "engine"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]
)
def test_an_entry_point_loads_nothing_heavy(group, engine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][group]
    assert points == {"kvtrie": f"kvtrie.engines.{engine}.plugin:register"}
    code = f"import sys, kvtrie.engines.{engine}.plugin; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "vllm", "sglang", "transformers"}
    assert not heavy & {name.partition(".")[0] for name in out.stdout.split()}


def test_registering_twice_is_registering_once(monkeypatch):
    from kvtrie.engines.vllm.plugin import register

    declared = {}

    def enter(name, path, kind):
        if (name, kind) in declared:
            raise ValueError(f"'{name}' is already registered.")
        declared[name, kind] = path

    def there(path, **tables):
        for name in [path.rsplit(".", at)[0] for at in range(1, path.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for table, method in tables.items():
            setattr(sys.modules[path], table, SimpleNamespace(**{method: enter}))

    there(FACTORY, KVConnectorFactory="register_connector")
    register()  # a vLLM that has no other table
    register()
    assert declared == {
        ("KvtrieConnector", "KvtrieConnector"): "kvtrie.engines.vllm",
    }
    there("vllm.v1.kv_offload.cpu.policies.factory", CachePolicyFactory="register_cache_policy")
    register()  # before 0.31
    assert len(declared) == 1
    there("vllm.v1.kv_hints")
    register()
    assert declared["kvtrie", "KvtrieCachePolicy"] == "kvtrie.engines.vllm.cache_policy"
