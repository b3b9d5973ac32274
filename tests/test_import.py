"""`import kvtrie` loads nothing of an engine, a GPU or a plot; no modules import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "python" / "kvtrie"

HEAVY = {"torch", "transformers", "safetensors", "gguf", "cuda", "triton", "rich", "matplotlib"}


def _loaded(module: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after importing one."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    return set(out.stdout.split())


@pytest.mark.parametrize("module", ["kvtrie", "kvtrie.cli", "kvtrie.cluster"])
def test_import_loads_nothing_heavy(module):
    loaded = _loaded(module)
    assert "kvtrie" in loaded
    assert not loaded & HEAVY


def test_the_probe_sees_what_is_loaded():
    assert "gguf" in _loaded("gguf")


def _imports() -> dict[str, set[str]]:
    """The modules of the package that each one imports, in TYPE_CHECKING blocks too."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= inner & modules.keys() or {node.module}
        found[module] = named & modules.keys() - {module}
    return found


def test_no_modules_import_each_other():
    imports = _imports()
    assert len(imports) > 200
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
