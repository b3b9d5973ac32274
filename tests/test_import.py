"""`import kvtrie` is light: it loads nothing of an engine, a GPU or a plot."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "safetensors", "gguf", "cuda", "triton", "rich", "matplotlib"}


def _loaded(module: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after importing one."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    return set(out.stdout.split())


@pytest.mark.parametrize("module", ["kvtrie", "kvtrie.cli"])
def test_import_loads_nothing_heavy(module):
    loaded = _loaded(module)
    assert "kvtrie" in loaded
    assert not loaded & HEAVY


def test_the_probe_sees_what_is_loaded():
    assert "gguf" in _loaded("gguf")
