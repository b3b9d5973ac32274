"""The bundle for a vLLM server on a card: its rows, its report without a card, and its trace."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benches.gpu import check, vllm
from benches.gpu.vllm_streams import Streams, streams_of

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "benches/gpu/vllm_bundle.sh"
RUN = ROOT / "benches/gpu/run_vllm.sh"
LAYERS = 3
ATTENTION, COPY = "kernel_unified_attention_2d", "Memcpy HtoD (Pinned -> Device)"


def event(stream, begin, end, name=COPY, cat="gpu_memcpy"):
    return {"cat": cat, "ts": begin, "dur": end - begin, "name": name, "args": {"stream": stream}}


def step(late=0, early=0):
    """Three layers of 10 each: loads on stream 9, attention on 7, stores on 11."""
    loads = [event(9, 10 * at, 10 * at + 8 + late) for at in range(LAYERS)]
    computed = [event(7, 10 * at + 8, 10 * at + 16, ATTENTION, "kernel") for at in range(LAYERS)]
    stores = [event(11, 10 * at + 16 - early, 10 * at + 20 - early) for at in range(LAYERS)]
    other = [{"cat": "cpu_op", "ts": 0, "dur": 1, "name": "aten::mm", "args": {}}]
    return [*stores, *other, *computed, *loads]


def test_streams_of_a_step_in_order():
    # Loads overlap attention from 10 to 16 and 20 to 26; stores from 18 to 20 and 28 to 30.
    assert streams_of(step(), LAYERS) == Streams(3, 0, 0, pytest.approx(16 / 36))


def test_late_loads_and_early_stores_are_counted():
    assert streams_of(step(late=1), LAYERS).late == LAYERS
    assert streams_of(step(early=1), LAYERS).early == LAYERS


@pytest.mark.parametrize("gone", [7, 9, 11])
def test_a_step_without_one_of_the_streams_is_an_error(gone):
    events = [each for each in step() if each["args"].get("stream") != gone]
    with pytest.raises(ValueError, match="a load stream and a store stream"):
        streams_of(events, LAYERS)


def test_without_a_card_every_row_of_the_bundle_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "device", lambda: None)
    status = check.main(["--out", str(tmp_path)], rows=vllm.ROWS, name="gpu-vllm")
    report = json.loads((tmp_path / "gpu-vllm.json").read_text())
    assert status == 2
    assert [row["name"] for row in report["rows"]] == [row.name for row in vllm.ROWS]
    assert {row["reason"] for row in report["rows"]} == {"no CUDA device"}
    assert "no CUDA device" in (tmp_path / "gpu-vllm.md").read_text()


def make_bundle(folder):
    """A bundle of two parts with a package, as the script for the real one writes it."""
    (folder / "tree/vllm/vllm").mkdir(parents=True)
    (folder / "tree/vllm/vllm/__init__.py").write_text("")
    with tarfile.open(folder / "vllm.tar.gz", "w:gz") as file:
        file.add(folder / "tree/vllm", "vllm")
    whole = (folder / "vllm.tar.gz").read_bytes()
    out = folder / "out"
    out.mkdir()
    for at, part in enumerate((whole[:100], whole[100:])):
        (out / f"vllm.tar.gz.{at:03}").write_bytes(part)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in out.iterdir()
    ]
    (out / "SHA256SUMS").write_text("\n".join([*sums, ""]))
    return out


def run_bundle(out, checkout):
    env = os.environ | {"PYTHON": sys.executable, "KVTRIE_CHECKOUT": str(checkout)}
    return subprocess.run(
        [str(RUN), str(out), "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def make_checkout(folder):
    """A checkout whose `benches.gpu.vllm` prints where vllm comes from."""
    (folder / "benches/gpu").mkdir(parents=True)
    for name in ("benches/__init__.py", "benches/gpu/__init__.py"):
        (folder / name).write_text("")
    shown = "import sys, vllm\nprint(vllm.__file__, sys.argv[1:])\n"
    (folder / "benches/gpu/vllm.py").write_text(shown)
    return folder


def test_parts_are_joined_once_and_a_damaged_part_is_refused(tmp_path):
    out, checkout = make_bundle(tmp_path), make_checkout(tmp_path / "checkout")
    ran = run_bundle(out, checkout)
    assert ran.returncode == 0, ran.stderr
    assert "target/gpu-vllm/vllm/vllm/__init__.py" in ran.stdout
    (checkout / "target/gpu-vllm/vllm/vllm/once.py").write_text("")
    assert run_bundle(out, checkout).returncode == 0
    assert (checkout / "target/gpu-vllm/vllm/vllm/once.py").exists()
    (out / "vllm.tar.gz.001").write_bytes(b"other")
    (out / "SHA256SUMS").write_bytes((out / "SHA256SUMS").read_bytes() + b"\n")
    damaged = run_bundle(out, checkout)
    assert (damaged.returncode, "damaged or missing" in damaged.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part-size", "0", "WHEEL", "OUT"], "a part of 0 MiB"),
        (["--fast", "WHEEL", "OUT"], "--fast is no option"),
        ([], "the wheel is missing"),
    ],
)
def test_wrong_options_of_the_bundle_are_refused(tmp_path, words, said):
    wheel = tmp_path / "kvtrie.whl"
    zipfile.ZipFile(wheel, "w").close()
    words = [str(wheel) if word == "WHEEL" else word for word in words]
    ran = subprocess.run(
        [str(BUNDLE), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert said in ran.stderr
