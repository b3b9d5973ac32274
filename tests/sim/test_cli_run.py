"""`kvtrie sim run`: its table, and settings and trace lines that it refuses."""

import json

import pytest

from kvtrie.cli import main


def test_a_person_reads_a_table(config, capsys):
    assert main(["sim", "run", str(config)]) == 0
    text = capsys.readouterr().out
    assert "3 requests, 0 refused, 192 prompt tokens, 0.2500 of them found" in text
    assert "host read                0.0         3.0      0.0015         0.0" in text
    assert (
        main(["sim", "run", str(config), "--set=goals.ttft_ns=64000", "--set=price.gpu_hour=2"])
        == 0
    )
    text = capsys.readouterr().out
    assert "goodput 0.998 requests/s: 0.6667 met the goals" in text
    assert "2.00 per hour" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tiers.0.blocks=0", "tiers.0: blocks of tier 'gpu' is 0"),
        ("tiers.0.blcks=9", "tiers.0.blcks is 9"),
        ("machines=0", "machines is 0"),
        ("seed=-1", "seed is -1"),
        ("model.layers=0", "model: layers is 0"),
        ("model.heads=3", "model.heads is 3"),
        ("manager.block_tokens=0", "manager.block_tokens is 0"),
        ("manager.policy=best", "policy 'best'"),
        ("manager.load=some", "manager.load is one of all, plan, none, not 'some'"),
        (
            "engine.kind=parallel",
            "engine.kind is one of serial, continuous, disaggregated, not 'parallel'",
        ),
        ("engine.token_budget=8", "engine.token_budget is 8"),
        ('engine={kind="continuous", token_budget=0}', "engine.token_budget is 0"),
        ('engine={kind="continuous", token_budget=8, max_running=9}', "engine.max_running is 9"),
        ('engine={kind="disaggregated"}', "machines is 1: engine.kind"),
        ('engine={kind="continuous", token_by_token=1}', "engine.token_by_token is 1"),
        ("router.kind=best", "router.kind is one of"),
        ("cost.alpha=-1", "cost.alpha is -1"),
        ('cost={kind="table", points=[[5, 2], [4, 3]]}', "cost.points: a cost table ascends"),
        ("tiers=[]", "tiers is ()"),
        ('tiers=[{kind="host", blocks=1}, {kind="gpu", blocks=1}]', "tier 1 is 'gpu'"),
        ('tiers=[{kind="gpu", blocks=4}, {kind="remote", blocks=4}]', "'host', which is missing"),
        ("tiers.1.read.bytes_per_s=0", "tiers.1.read: bytes_per_s"),
        ("tiers.7.blocks=3", "7 is no place in a list of 2"),
        ("trace.path=none.jsonl", "none.jsonl"),
        ("trace.format=csv", "not 'csv'"),
        ('trace={format="chats", requests=0}', "trace: requests is 0"),
        ('trace={format="chats", path="x"}', "trace.path is 'x', but there is no such key"),
        ('trace={format="segments", reuse_ratio=2}', "trace: reuse_ratio is 2"),
        ('trace={format="segments", segment_length=20}', "segment_length is 20, a multiple of"),
        ('trace={format="sharegpt-like", turns=1}', "trace: turns is 1"),
        ('trace={format="segments", arrivals={kind="none"}}', "trace.arrivals: kind is one of"),
        ("shards=1", "shards is 1"),
        ("lanes.path=none.toml", "cannot read the profile none.toml"),
        ("lanes.path=t.jsonl", "is no profile of `kvtrie profile`"),
        ("lanes.speed=2", "lanes.speed is 2"),
        ("peers.lookup=some", "peers.lookup is one of own, all, not 'some'"),
        ("peers.lookup=all", "peers.bytes_per_s is missing"),
        ('peers={lookup="all", bytes_per_s=0}', "peers: bytes_per_s of lane 'peers' is 0"),
        ("prefetch=always", "prefetch is one of never, arrival, not 'always'"),
        ('tiers.1.layout={dtype="int3"}', "tiers.1.layout: dtype is one of"),
        ("tiers.1.layout.bits=4", "tiers.1.layout.bits is 4"),
        ("tiers.0.layer_slots=3", "tiers.0: layer_slots of tier 'gpu' is 3"),
        ("tiers.0.admit_after=-1", "tiers.0: admit_after of tier 'gpu' is -1"),
        ("tiers.0.free_low=1.5", "tiers.0: free_low of tier 'gpu' is 1.5"),
        ("manager.drop_order=deep", "manager.drop_order is one of"),
        ("manager.epsilon=2", "manager.epsilon is 2"),
        ("manager.objective=time", "manager.objective is one of"),
        ("trace.ends=perhaps", "trace.ends is"),
        ("goals.ttft_ns=-1", "goals.ttft_ns is -1"),
        ("goals.e2e_ns=1", "goals.e2e_ns is 1"),
        ("price.gpu_hour=-2.5", "price.gpu_hour is -2.5"),
        ("price.gib_hour.tape=1", "price.gib_hour.tape is 1"),
        ("seed", "KEY=VALUE"),
    ],
)
def test_bad_settings_are_refused_with_key_and_value(config, capsys, change, message):
    lines = config.with_name("lines.jsonl")
    assert main(["sim", "run", str(config), "--requests", str(lines), "--set", change]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
    assert not lines.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "a JSON object wanted"),
        ("{", "no JSON"),
        ('{"arrival_ns": 5, "tokens": []}', "tokens is []"),
        ('{"arrival_ns": 1.5, "tokens": [1]}', "arrival_ns is 1.5"),
        ('{"arrival_ns": 5, "tokens": [1, -2]}', "tokens[1] is -2"),
        ('{"arrival_ns": 5, "tokens": [1, 4294967296]}', "tokens[1] is 4294967296"),
        ('{"arrival_ns": 5, "tokens": [1, "a"]}', "tokens[1] is 'a'"),
        ('{"arrival_ns": 5, "tokens": [1], "output_tokens": -1}', "output_tokens is -1"),
        ('{"arrival_ns": 4, "tokens": [1]}', "arrival_ns is 4, before the 5 of the request above"),
    ],
)
def test_a_bad_line_is_named(config, capsys, line, message):
    good = '{"arrival_ns": 5, "tokens": [1, 2]}\n'
    config.with_name("t.jsonl").write_text(f"{good}\n{line}\n")
    assert main(["sim", "run", str(config), "--json"]) == 2
    out, err = capsys.readouterr()
    assert "line 3" in err
    assert message in err
    assert not out


def test_a_named_model_keeps_what_its_groups_need(tmp_path, capsys):
    config = tmp_path / "hybrid.toml"
    config.write_text(
        '[trace]\nformat = "agents"\nrequests = 200\n'
        "[model]\nlayers = 2\nkv_heads = 1\nhead_dim = 4\n"
        '[[tiers]]\nkind = "gpu"\nbytes = "8GiB"\n'
        '[[tiers]]\nkind = "host"\nbytes = "8GiB"\n'
    )
    found = {}
    for model, options in (
        ("gemma-3-27b", []),
        ("gemma-3-27b", ["--groups=off"]),
        ("qwen3-next-80b", ["--points=512"]),
    ):
        named = ["--model", model, *options]
        assert main(["sim", "run", str(config), *named, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        found[tuple(named)] = sum(figures["hit_tokens"].values()) / figures["input_tokens"]
        assert figures["requests"] == 200
    apart, together, states = found.values()
    assert apart > together + 0.1
    assert states > 0
    assert main(["sim", "run", str(config), "--groups=off"]) != 0
    assert "--groups and --points go with --model" in capsys.readouterr().err
    network = ["--set=machines=2", '--set=peers={lookup="all", bytes_per_s=1e9}']
    assert main(["sim", "run", str(config), "--model=gemma-3-27b", *network]) != 0
    assert "machines exchange blocks of one group of layers" in capsys.readouterr().err
