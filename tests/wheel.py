"""The wheel alone: tags, size, and what runs in an environment that holds it and numpy.

`make test-wheel` runs it; `make test` does not, since it builds the extension a second time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
MOST_BYTES = 4 << 20
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: object, **kwargs) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    out = ROOT / "target/wheel"
    for old in out.glob("*.whl"):
        old.unlink()
    run(TOOLS / "maturin", "build", "--quiet", "--release", "--out", out, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("alone")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    run(TOOLS / "uv", "pip", "install", "--quiet", "--python", python, wheel)
    return python


@pytest.mark.timeout(900)
def test_it_is_one_small_abi3_wheel(wheel):
    assert re.fullmatch(r"kvtrie-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvtrie"}
    assert {"kvtrie/py.typed", "kvtrie/_kvtrie.pyi"} <= set(names)


def test_it_brings_numpy_and_nothing_else(alone):
    listed = json.loads(run(TOOLS / "uv", "pip", "list", "--format=json", "--python", alone))
    assert {each["name"] for each in listed} == {"kvtrie", "numpy"}
    run(alone, "-c", "import kvtrie, sys; assert not {'torch', 'cuda'} & set(sys.modules)")


def test_it_injects_no_faults(alone):
    run(alone, "-c", "from kvtrie import _kvtrie; assert not hasattr(_kvtrie, 'Faults')")


def test_the_first_request_of_the_guide_runs(alone, tmp_path):
    snippets = SNIPPET.findall((ROOT / "docs/guide.md").read_text())[:3]
    assert "lease.commit" in snippets[-1]
    run(alone, "-c", "\n".join(snippets), cwd=tmp_path)


def test_a_trace_is_replayed(alone, tmp_path):
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 1, "hash_ids": [1, at % 2]}
        for at in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run(alone.with_name("kvtrie"), "replay", trace, "--tier", "gpu=8", "--json")
    assert json.loads(said)["requests"] == len(rows)
