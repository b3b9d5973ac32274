"""The wheel alone: tags, size, and what runs in an environment that holds it and numpy.

`make test-wheel` builds one and runs this; `make test` does not, since it compiles the extension a
second time. `make wheels` runs it over all files of a release, in the folder `KVTRIE_RELEASE`:
those of another processor under qemu-user.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated import emulated_python
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
RELEASE = os.environ.get("KVTRIE_RELEASE")
WHEELS = sorted(Path(RELEASE).glob("*.whl")) if RELEASE else [None]
PACKAGE = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
TAGS = ("cp311-abi3", "cp314-cp314t")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_28_x86_64")
OLDEST_GLIBC = (2, 28)  # of a release: RHEL 8
MOST_BYTES = 4 << 20
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Alone:
    """Commands of an environment that holds the wheel and its dependencies."""

    python: list[object]
    kvtrie: list[object]
    path: str = ""

    def run(self, *words: object, **kwargs) -> str:
        return run(*words, env=os.environ | {"PYTHONPATH": self.path}, **kwargs)


def run(*command: object, **kwargs) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def tag_of(wheel: Path):
    """The interpreter and ABI of a wheel, and its processor."""
    (tag,) = parse_wheel_filename(wheel.name)[3]
    return f"{tag.interpreter}-{tag.abi}", re.search(r"x86_64$|aarch64$", tag.platform)[0]


@pytest.fixture(scope="module", params=WHEELS, ids=lambda path: path and path.stem)
def wheel(request) -> Path:
    if request.param:
        return request.param
    out = ROOT / "target/wheel"
    for old in out.glob("*.whl"):
        old.unlink()
    run(TOOLS / "maturin", "build", "--quiet", "--release", "--out", out, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    tag, machine = tag_of(wheel)
    install = (TOOLS / "uv", "pip", "install", "--quiet", wheel)
    if machine == platform.machine():
        base = sys.executable if "abi3" in tag else shutil.which("python3.14t")
        if base is None:
            pytest.skip(f"{wheel.name} did not run: there is no python3.14t")
        run(base, "-m", "venv", "--without-pip", folder)
        run(*install, "--python", folder / "bin/python")
        return Alone([folder / "bin/python"], [folder / "bin/kvtrie"])
    if "abi3" not in tag:
        pytest.skip(f"{wheel.name} did not run: Debian has no free-threaded Python for {machine}")
    try:
        python = emulated_python(machine, ROOT / "target/emulated")
    except LookupError as error:
        pytest.skip(f"{wheel.name} did not run: {error}")
    version = run(*python, "-c", "import platform; print(platform.python_version())").strip()
    where = ("--python-platform", f"{machine}-unknown-linux-gnu", "--python-version", version)
    run(*install, "--no-build", *where, "--target", folder)
    return Alone(python, [*python, folder / "bin/kvtrie"], str(folder))


@pytest.mark.timeout(900)
def test_it_is_one_small_wheel(wheel):
    tag, _ = tag_of(wheel)
    assert tag in TAGS if RELEASE else tag == TAGS[0]
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvtrie"}
    assert {"kvtrie/py.typed", "kvtrie/_kvtrie.pyi"} <= set(names)


def test_its_metadata_has_the_version_and_the_urls(wheel):
    folder = f"kvtrie-{PACKAGE['version']}.dist-info"
    lines = zipfile.ZipFile(wheel).read(f"{folder}/METADATA").decode().splitlines()
    assert {
        f"Version: {PACKAGE['version']}",
        f"Project-URL: Homepage, {PACKAGE['homepage']}",
        f"Project-URL: Source Code, {PACKAGE['repository']}",
    } <= set(lines)


@pytest.mark.timeout(900)
def test_the_command_of_readme_installs_it_next_to_numpy(wheel, tmp_path):
    tag, machine = tag_of(wheel)
    if (tag, machine) != (TAGS[0], platform.machine()):
        pytest.skip(f"{wheel.name} is for another interpreter or processor")
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^pip (install --no-index .* kvtrie)$", readme, re.MULTILINE)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    run(TOOLS / "uv", "pip", "install", "--quiet", "numpy", "--python", python)
    (tmp_path / "dist").symlink_to(wheel.parent)
    run(TOOLS / "uv", "pip", *command.split(), "--python", python, cwd=tmp_path)
    run(python, "-c", "import kvtrie; kvtrie.BlockManager")


@pytest.mark.skipif(not RELEASE, reason="a single wheel is not a release")
def test_a_release_has_a_wheel_per_tag_and_a_source_distribution_with_its_commit():
    version = PACKAGE["version"]
    wheels = {f"kvtrie-{version}-{tag}-{where}.whl" for tag in TAGS for where in PLATFORMS}
    source = f"kvtrie-{version}.tar.gz"
    assert {path.name for path in Path(RELEASE).iterdir()} == wheels | {source}
    with tarfile.open(Path(RELEASE) / source) as archive:
        commit = archive.extractfile(f"kvtrie-{version}/COMMIT").read().decode()
    assert re.fullmatch(r"[0-9a-f]{12}\+?\n", commit)
    tags = run("git", "tag", "--points-at", "HEAD", cwd=ROOT).split()
    assert not tags or f"v{version}" in tags


@pytest.mark.skipif(not RELEASE, reason="only a release is linked with an old glibc")
def test_auditwheel_finds_no_newer_glibc(wheel):
    said = run(TOOLS / "auditwheel", "show", wheel)
    tags = re.findall(r'tag: "manylinux_(\d+)_(\d+)_\w+"', " ".join(said.split()))
    assert tags
    assert all((int(major), int(minor)) <= OLDEST_GLIBC for major, minor in tags)


def test_it_brings_numpy_and_nothing_else(alone):
    listing = "from importlib.metadata import distributions as d; print(*{x.name for x in d()})"
    assert set(alone.run(*alone.python, "-c", listing).split()) == {"kvtrie", "numpy"}
    loaded = "import kvtrie, sys; assert not {'torch', 'cuda'} & set(sys.modules)"
    alone.run(*alone.python, "-c", loaded)


def test_it_runs_on_its_processor_without_an_interpreter_lock_where_python_has_none(alone, wheel):
    tag, machine = tag_of(wheel)
    asked = "import kvtrie, platform, sys; print(platform.machine(), *sys.abiflags, end=' ');"
    asked += "print(getattr(sys, '_is_gil_enabled', lambda: True)())"
    free = tag == "cp314-cp314t"
    assert alone.run(*alone.python, "-c", asked).split() == [machine, *"t" * free, str(not free)]


def test_it_injects_no_faults(alone):
    asked = "from kvtrie import _kvtrie; assert not hasattr(_kvtrie, 'Faults')"
    alone.run(*alone.python, "-c", asked)


def test_it_names_its_version_and_commit(alone):
    said = alone.run(*alone.kvtrie, "--version")
    assert re.fullmatch(rf"kvtrie {PACKAGE['version']} \(core [0-9a-f]{{12}}\+?\)\n", said)
    assert alone.run(*alone.python, "-m", "kvtrie", "--version") == said
    assert said.split(maxsplit=1)[1].strip() in alone.run(*alone.kvtrie, "doctor")


def test_the_first_request_of_the_guide_runs(alone, tmp_path):
    snippets = SNIPPET.findall((ROOT / "docs/guide.md").read_text())[:3]
    assert "lease.commit" in snippets[-1]
    alone.run(*alone.python, "-c", "\n".join(snippets), cwd=tmp_path)


def test_a_trace_is_replayed(alone, tmp_path):
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 1, "hash_ids": [1, at % 2]}
        for at in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = alone.run(*alone.kvtrie, "replay", trace, "--tier", "gpu=8", "--json")
    assert json.loads(said)["requests"] == len(rows)
