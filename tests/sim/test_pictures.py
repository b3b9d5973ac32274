"""Pictures of `kvtrie sim`, and the trace for Perfetto."""

import itertools
import json

import pytest

from kvtrie.cli import main

SETTINGS = """
machines = 2
trace = {path="t.jsonl"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
cost = {kind="affine", ns_per_token=1000}
peers = {lookup="all", bytes_per_s=8192000}
price = {gpu_hour=2.0, gib_hour={host=0.01}}
tiers = [{kind="gpu", blocks=6, write="through"}, {kind="host", blocks=64}]
"""


@pytest.fixture
def config(forty_requests):
    return forty_requests(SETTINGS)


def test_perfetto_shows_steps_transmissions_and_requests(config, capsys, tmp_path):
    out = tmp_path / "trace.json"
    assert main(["sim", "run", str(config), "--json", "--perfetto", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    events = json.loads(out.read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert sorted(names.values()).count("engine") == 2
    spans = [event for event in events if event["ph"] == "X"]
    for lane, use in figures["lanes"].items():
        of = [span for span in spans if names[span["pid"], span["tid"]] == lane]
        assert sum(span["args"]["bytes"] for span in of) == use["bytes"]
        assert sum(span["dur"] for span in of) == pytest.approx(use["busy_ns"] / 1000)
    assert figures["lanes"]["peers"]["bytes"] > 0
    # One thing at a time on each track.
    by_track = {}
    for span in spans:
        by_track.setdefault((span["pid"], span["tid"]), []).append(span)
    for of in by_track.values():
        for one, other in itertools.pairwise(of):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    assert [event["ph"] for event in events if event.get("id") == 7] == ["b", "n", "e"]


def test_pictures_are_written(config, capsys, tmp_path):
    tiers, folder = tmp_path / "tiers.png", tmp_path / "new" / "pictures"
    run = ["sim", "run", str(config), "--plot", str(tiers), "--sample-ns", "1000000"]
    assert main(run) == 0
    over = ["--over", "tiers.1.blocks=8,64", "--over", "manager.policy=lru,fifo"]
    assert main(["sim", "sweep", str(config), *over, "--plot", str(folder)]) == 0
    vary = ["--vary", "router.kind=round-robin,hash"]
    assert main(["sim", "compare", str(config), *vary, "--plot", str(folder)]) == 0
    capsys.readouterr()
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["hits.png", "ratios.png", "times.png"]
    for path in (tiers, *folder.iterdir()):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_a_row_of_csv(config, capsys, tmp_path):
    table = tmp_path / "run.csv"
    assert main(["sim", "run", str(config), "--json", "--csv", str(table)]) == 0
    figures = json.loads(capsys.readouterr().out)
    heads, row = table.read_text().splitlines()
    cells = dict(zip(heads.split(","), row.split(","), strict=True))
    assert cells["tiers.host.hits"] == str(figures["tiers"][1]["hits"])
    assert cells["ttft_ns.p99"] == str(figures["ttft_ns"]["p99"])


def test_what_cannot_be_written_is_named(config, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for option, place, message in (
        ("--perfetto", "missing/t.json", "cannot write"),
        ("--csv", "missing/t.csv", "cannot write"),
        ("--plot", "t.docx", "cannot write the picture"),
        ("--sample-ns", "0", "--sample-ns is 0"),
    ):
        given = place if option == "--sample-ns" else str(tmp_path / place)
        assert main(["sim", "run", str(config), "--json", option, given]) == 2
        assert message in capsys.readouterr().err
    words = ["sim", "compare", str(config), "--vary", "seed=1,2", "--plot", str(tmp_path / "file")]
    assert main(words) == 2
    assert "cannot make the folder" in capsys.readouterr().err
