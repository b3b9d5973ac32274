"""The list of what is used of vLLM is whole: every name that our sources import stands in it.

`make test-engines` compares the list with the installed vLLM, and with `ARGS=--next` with the next.
"""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "python" / "kvtrie" / "engines" / "vllm"
LIST = runpy.run_path(str(ROOT / "tests" / "served" / "surface.py"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_what_a_file_imports_of_vllm_is_in_the_list(path):
    listed = {*LIST["USED"], *((module, name) for module, name in LIST["NAMES"])}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                assert (node.module, alias.name) in listed
