"""`kvtrie sim sweep` and `compare`: figures of single runs, by any executor, and resumed."""

import csv
import json
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim import sweep as sweeping
from kvtrie.sim.config import read_config
from kvtrie.sim.grid import grid
from kvtrie.sim.run import run_config
from kvtrie.sim.sweep import digest_of, iter_sweep, sweep

SETTINGS = """
trace = {path="t.jsonl"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
cost = {kind="affine", ns_per_token=1000}
goals = {ttft_ns=2000000}
tiers = [{kind="gpu", blocks=6, write="through"}, {kind="host", blocks=64}]
"""
OVER = ("tiers.1.blocks=8,64", "manager.policy=lru,fifo")


@pytest.fixture
def config(forty_requests):
    return forty_requests(SETTINGS)


def single(config, *changes):
    return run_config(read_config(config, changes))


def test_a_sweep_is_the_single_runs(config, capsys, tmp_path):
    table = tmp_path / "all.csv"
    options = [word for over in OVER for word in ("--over", over)]
    assert main(["sim", "sweep", str(config), *options, "--json", "--csv", str(table)]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = [
        {"tiers.1.blocks": blocks, "manager.policy": policy}
        for blocks in (8, 64)
        for policy in ("lru", "fifo")
    ]
    assert [row["settings"] for row in found] == settings
    for row in found:
        changes = (f"{name}={value}" for name, value in row["settings"].items())
        assert row["figures"] == single(config, *changes)
    assert len({json.dumps(row["figures"]) for row in found}) > 2
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["tiers.1.blocks"] for row in rows] == ["8", "8", "64", "64"]
    assert [int(row["tiers.host.hits"]) for row in rows] == [
        row["figures"]["tiers"][1]["hits"] for row in found
    ]
    assert main(["sim", "sweep", str(config), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["tiers.1.blocks", "manager.policy", "found"]
    assert len(lines) == 5


def test_results_are_gone_on_from(config, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    configs = [cell.config for cell in grid(config, (), OVER)]
    begun = iter_sweep(configs, results=results)
    next(begun)
    begun.close()
    written = results.read_text()
    assert 1 <= len(written.splitlines()) < 4
    results.write_text(written + '{"key": "a line that was cut sho')
    ran = []

    def counted(config, **rest):
        ran.append(config)
        return run_config(config, **rest)

    monkeypatch.setattr(sweeping, "run_config", counted)
    whole = sweep(configs, results=results)
    assert len(ran) == 4 - len(written.splitlines())
    assert list(whole) == [run_config(one) for one in configs]
    assert len(results.read_text().splitlines()) == 4
    assert sweep(configs[::-1], results=results) == whole[::-1]
    assert len(ran) == 4 - len(written.splitlines())
    results.write_text("[]\n")
    with pytest.raises(ConfigError, match="line 1: no result of a sweep"):
        sweep(configs, results=results)
    for other in ("thesis without a last line end", written + "thesis"):
        results.write_text(other)
        with pytest.raises(ConfigError, match="no result of a sweep"):
            sweep(configs, results=results)
        assert results.read_text() == other


def test_equal_configs_run_once_and_other_traces_have_other_digests(config, tmp_path):
    one = read_config(config)
    results = tmp_path / "results.jsonl"
    assert len(sweep([one, one], results=results)) == 2
    assert len(results.read_text().splitlines()) == 1
    before = digest_of(one)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "t.jsonl").write_bytes(one.trace.path.read_bytes())
    (moved / "sim.toml").write_text(SETTINGS)
    assert digest_of(read_config(moved / "sim.toml")) == before
    assert digest_of(read_config(config, ["seed=1"])) != before
    with one.trace.path.open("a") as file:
        file.write('{"arrival_ns": 1000000000, "tokens": [1]}\n')
    assert digest_of(one) != before


def test_traces_that_are_made_up_are_swept(config, tmp_path):
    made = ('trace={format="sharegpt-like", requests=30}', "tiers.0.blocks=400")
    results = tmp_path / "results.jsonl"
    cells = grid(config, made, ["seed=1,2"])
    one, other = sweep([cell.config for cell in cells], results=results)
    assert one == single(config, *made, "seed=1")
    assert one["input_tokens"] != other["input_tokens"]
    assert len(results.read_text().splitlines()) == 2


@pytest.mark.slow
def test_runs_go_to_processes(config):
    configs = [cell.config for cell in grid(config, (), OVER)]
    with ProcessPoolExecutor(2) as executor:
        found = sweep(configs, executor=executor)
    assert list(found) == [run_config(one) for one in configs]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Dask's own
def test_runs_go_to_dask(config):
    distributed = pytest.importorskip("distributed", reason="the extra `sweep`")
    configs = [cell.config for cell in grid(config, (), OVER)]
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = sweep(configs, executor=client.get_executor())
    assert list(found) == [run_config(one) for one in configs]


def test_compare_shows_ratios_to_the_first(config, capsys):
    vary = ["--vary", "manager.policy=lru,fifo", "--vary", "tiers.1.blocks=8,64"]
    assert main(["sim", "compare", str(config), *vary, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert set(rows[0]["ratios"].values()) <= {1.0, None}
    first, last = rows[0], rows[3]
    for name in ("found", "ttft_mean_ms", "goodput_per_s"):
        assert last["ratios"][name] == last["headline"][name] / first["headline"][name]
    assert last["headline"]["ttft_mean_ms"] == last["figures"]["ttft_ns"]["mean"] / 1e6
    assert main(["sim", "compare", str(config), *vary]) == 0
    text = capsys.readouterr().out
    assert "over the first" in text
    assert "1.000" in text


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("tiers.0.blocks=6,0", "tiers.0: blocks of tier 'gpu' is 0"),
        ("tiers.0.blcks=6,7", "tiers.0.blcks is 6"),
        ("manager.policy=lru,best", "policy 'best'"),
        ("tiers.9.blocks=1", "--over tiers.9.blocks=1: 9 is no place in a list of 2"),
        ("tiers.0.blocks", "--over takes KEY=VALUE,VALUE, not 'tiers.0.blocks'"),
        ("trace.path=none.jsonl,t.jsonl", "none.jsonl"),
        ("seed=" + ",".join(map(str, range(400))), "makes 160000 combinations"),
    ],
)
def test_nothing_runs_before_all_is_checked(config, capsys, monkeypatch, over, message):
    monkeypatch.setattr(sweeping, "run_config", pytest.fail)
    more = ["--over", "machines=" + ",".join(["1"] * 400)] if over.startswith("seed") else []
    assert main(["sim", "sweep", str(config), "--over", over, *more]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
