"""The source distribution: what is in it, its size, and that the wheel can be built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
MOST_BYTES = 2 << 20


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_wheel_is_built_from_a_small_source_distribution_alone(tmp_path):
    build = [TOOLS / "maturin", "sdist", "--out", tmp_path]
    subprocess.run(build, check=True, cwd=ROOT)
    (packed,) = tmp_path.glob("*.tar.gz")
    assert packed.stat().st_size < MOST_BYTES
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "source", filter="data")
    assert {"pyproject.toml", "Cargo.lock", "LICENSE", "python/kvtrie/__init__.py"} <= names
    assert any(name.startswith("cuda/") and name.endswith(".cu") for name in names)
    assert not any(name.startswith(("tests/", "benches/", "target/")) for name in names)
    (source,) = (tmp_path / "source").iterdir()
    (source / "COMMIT").write_text("0123456789ab\n")  # as `make wheels` packs it; there is no git
    wheel = [TOOLS / "maturin", "build", "--quiet", "--release", "--out", tmp_path / "wheels"]
    subprocess.run(wheel, check=True, cwd=source)
    (built,) = (tmp_path / "wheels").glob("*.whl")
    assert "-cp311-abi3-" in built.name
    shutil.unpack_archive(built, tmp_path / "site", "zip")
    asked = (sys.executable, "-c", "from kvtrie._kvtrie import COMMIT; print(COMMIT)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.check_output(asked, env=environment, text=True) == "0123456789ab\n"
