"""`kvtrie sim run`: figures worked out by hand, and what it refuses."""

import json

import pytest

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import TraceSource, read_config
from kvtrie.sim.requests import trace_requests

A = list(range(64))
B = list(range(100, 164))
SECOND = 10**9
SETTINGS = """
seed = 0
machines = 1
trace = {path="t.jsonl", format="tokens"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
manager = {block_tokens=16, policy="lru", load="all", keep=1}
engine = {kind="serial", wait="all"}
cost = {kind="affine", ns_per_token=1000, alpha=0.0}
router = {kind="round-robin"}
tiers = [
  {kind="gpu", blocks=4, write="through"},
  {kind="host", blocks=64, read={bytes_per_s=16384000, latency_ns=0}, \
store={bytes_per_s=16384000, latency_ns=0}},
]
"""


def write(folder, *requests, settings=SETTINGS):
    """The settings with a trace of `(seconds, tokens)`."""
    rows = ({"arrival_ns": int(at * SECOND), "tokens": t, "output_tokens": 1} for at, t in requests)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "sim.toml"
    path.write_text(settings)
    return path


@pytest.fixture
def config(tmp_path):
    return write(tmp_path, (0, A), (1, B), (2, A))


def play(config, capsys, *changes):
    """The figures of a run and its lines."""
    lines = config.with_name("lines.jsonl")
    options = [word for change in changes for word in ("--set", change)]
    assert main(["sim", "run", str(config), "--json", "--requests", str(lines), *options]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads(capsys.readouterr().out), rows


def waits(lines):
    return [line["first_token_ns"] - line["arrival_ns"] for line in lines]


def test_the_document_of_a_run_is_the_same_to_the_byte(config, capsys):
    texts = []
    for _ in range(2):
        assert main(["sim", "run", str(config), "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_prompt_comes_back_from_the_host(config, capsys):
    figures, lines = play(config, capsys)
    assert waits(lines) == [64_000, 64_000, 3_016_000]
    assert lines[2] == {
        "id": 2,
        "machine": 0,
        "arrival_ns": 2 * SECOND,
        "first_token_ns": 2 * SECOND + 3_016_000,
        "end_ns": 2 * SECOND + 3_016_000,
        "hit_tokens": {"gpu": 0, "host": 48, "disk": 0, "peer": 0},
        "computed_tokens": 16,
    }
    assert figures["ttft_ns"] == {
        "mean": 1_048_000,
        "p50": 64_000,
        "p90": 3_016_000,
        "p99": 3_016_000,
    }
    assert (figures["requests"], figures["refused"], figures["stalled_ns"]) == (3, 0, 3_000_000)
    assert [(tier["kind"], tier["hits"]) for tier in figures["tiers"]] == [("gpu", 0), ("host", 3)]
    assert figures["lanes"]["host read"] == {
        "bytes": 3 << 14,
        "busy_ns": 3_000_000,
        "use": 3_000_000 / figures["end_ns"],
        "waited_ns": 0,
    }
    # Eight blocks are stored in two groups of four, each of which begins at once.
    assert figures["lanes"]["host store"]["waited_ns"] == 0
    assert (figures["tiers"][1]["hit_tokens"], figures["tiers"][1]["saved_ns"]) == (48, 48_000)
    assert (figures["goodput"], figures["cost"], figures["saturated"]) == (None, None, False)
    again, same = play(config, capsys)
    assert same == lines
    assert again == figures


@pytest.mark.parametrize(
    ("change", "last"),
    [
        ("engine.wait=layer", 3_004_000),
        ("manager.keep=17", 2_032_000),
        ("manager.load=plan", 64_000),
        ("tiers.1.read.bytes_per_s=32768000", 1_516_000),
        ("tiers.1.read.latency_ns=7", 3_016_007),
        ("tiers.0.write=never", 64_000),
        # An eight-bit layout halves the bytes: 3 blocks take 1.5 ms.
        ('tiers.1.layout={dtype="float8_e4m3fn"}', 1_516_000),
        ("tiers.0.admit_after=2", 64_000),
        ("tiers.0.blocks=8", 16_000),
        ("cost.alpha=1.0", 3_000_000 + 1000 * sum(range(49, 65))),
        ('cost={kind="table", points=[[0, 500], [64, 500]]}', 3_008_000),
        ("transfer=predicted", 3_016_000),
    ],
)
def test_settings_change_the_third_request(config, capsys, change, last):
    assert waits(play(config, capsys, change)[1])[2] == last


def test_blocks_are_loaded_while_a_request_waits(tmp_path, capsys):
    """A comes in while another prompt computes for 5 ms, which hides the 3 ms of its loads."""
    config = write(tmp_path, (0, A), (1, B), (2, list(range(200, 232))), (2, A))
    changes = ("tiers.0.blocks=6", "cost.ns_per_token=156250")
    figures, lines = play(config, capsys, *changes)
    assert (waits(lines)[3], figures["stalled_ns"]) == (10_500_000, 3_000_000)
    figures, lines = play(config, capsys, *changes, "prefetch=arrival")
    assert (waits(lines)[3], figures["stalled_ns"]) == (7_500_000, 0)
    assert lines[3]["hit_tokens"]["gpu"] == 48
    # Without a lower tier there is nothing to load.
    one = 'tiers=[{kind="gpu", blocks=6}]'
    assert play(config, capsys, one, "prefetch=arrival")[1] == play(config, capsys, one)[1]


def test_lanes_carry_bytes_of_the_tiers_layout(config, capsys):
    figures, _ = play(config, capsys, 'tiers.1.layout={dtype="float8_e4m3fn"}')
    assert figures["lanes"]["host read"]["bytes"] == 3 << 13


def test_lanes_report_how_long_transmissions_waited(config, capsys):
    # Predicted, each of the three blocks is a transmission of a millisecond after the others.
    for change, waited in ((), 0), (("transfer=predicted",), 3_000_000):
        assert play(config, capsys, *change)[0]["lanes"]["host read"]["waited_ns"] == waited


def test_tokens_can_be_played_one_by_one(config, capsys):
    words = ["sim", "run", str(config), "--json", "--token-by-token"]
    assert main([*words, "--set", "engine.kind=continuous"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3
    assert main(words) == 2
    assert "engine.token_by_token is True" in capsys.readouterr().err


def test_goodput_counts_requests_that_meet_all_goals(config, capsys):
    figures, _ = play(config, capsys, "goals.ttft_ns=64000")
    assert figures["goodput"] == {"requests": 2, "share": 2 / 3, "per_s": 2 / 2.003016}
    figures, _ = play(config, capsys, "goals={ttft_ns=3016000, tpot_ns=0}")
    assert figures["goodput"]["requests"] == 3


def test_tokens_after_the_first_have_a_goal_of_their_own(config, capsys):
    rows = [json.loads(line) for line in config.with_name("t.jsonl").read_text().splitlines()]
    rows[1]["output_tokens"] = 5
    config.with_name("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures, _ = play(config, capsys, "goals.tpot_ns=999", "tiers.0.blocks=9")
    assert (figures["tpot_ns"]["p50"], figures["goodput"]["requests"]) == (1000, 2)


def test_a_run_costs_its_machines_and_rooms_by_the_hour(config, capsys):
    # A block is 2**14 bytes, so 2**16 of them are a GiB.
    figures, _ = play(
        config,
        capsys,
        "tiers.1.blocks=131072",
        "machines=2",
        "price={gpu_hour=3.0, gib_hour={host=0.5, disk=9.0}}",
    )
    hours = figures["end_ns"] / 3.6e12
    assert figures["cost"] == {
        "per_hour": 8.0,
        "run": 8.0 * hours,
        "per_million_tokens": 8.0 * hours * 1e6 / 195,
    }


@pytest.mark.parametrize(("apart", "saturated"), [(0.00007, False), (0.00006, True)])
def test_requests_that_pile_up_saturate_a_run(tmp_path, capsys, apart, saturated):
    """A request takes 64 us; those that come every 60 us wait ever longer."""
    prompts = [list(range(64 * at, 64 * at + 64)) for at in range(100)]
    config = write(tmp_path, *((at * apart, prompt) for at, prompt in enumerate(prompts)))
    figures, _ = play(config, capsys, "tiers.0.write=never")
    assert figures["saturated"] is saturated
    assert figures["waiting"] == ({"half": 4, "end": 8} if saturated else {"half": 1, "end": 1})


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


def test_a_hash_is_as_many_blocks_as_it_has_tokens_for(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 2, "input_length": 700, "output_length": 9, "hash_ids": [5, 1]}
    path.write_text(json.dumps(row) + "\n")
    source = TraceSource(path, "mooncake")
    rows = [(at, t.tolist(), *rest) for at, t, *rest in trace_requests(source, 512)]
    assert rows == [(2_000_000, [5, 1], 700, 9, None)]
    # Hash 5 is the blocks 20 to 23; of hash 1, 188 tokens are there, which begin two blocks.
    (rows,) = trace_requests(TraceSource(path, "mooncake", output=False), 128)
    assert (rows[1].tolist(), rows[3]) == ([20, 21, 22, 23, 4, 5], 1)


def test_a_path_starts_at_the_settings_folder(tmp_path, monkeypatch):
    config = write(tmp_path, (0, A))
    monkeypatch.chdir("/")
    assert read_config(config).trace.path == tmp_path / "t.jsonl"
    with pytest.raises(ConfigError, match="cannot read the settings"):
        read_config(tmp_path / "missing.toml")


@pytest.mark.parametrize(("shares", "last"), [(', shares="net"', 15_016_000), ("", 9_016_000)])
def test_a_prompt_comes_from_another_machine(tmp_path, capsys, shares, last):
    config = write(tmp_path, (0, A), (0, B), (1, B), (1, A))
    peers = f'peers={{lookup="all", bytes_per_s=8192000, latency_ns=0{shares}}}'
    figures, lines = play(config, capsys, "machines=2", peers)
    assert waits(lines) == [64_000, 64_000, 9_016_000, last]
    assert lines[3]["hit_tokens"] == {"gpu": 0, "host": 0, "disk": 0, "peer": 48}
    network = figures["lanes"]["peers"]
    assert (network["bytes"], network["busy_ns"]) == (6 << 14, 12_000_000)
    assert network["waited_ns"] == (6_000_000 if shares else 0)
    queues = 1 if shares else 2
    assert network["use"] == 12_000_000 / (queues * figures["end_ns"])
    assert (figures["saved_ns"]["peer"], figures["saved_ns"]["host"]) == (96_000, 0)
    assert waits(play(config, capsys, "machines=2", "peers.lookup=own")[1])[3] == 64_000


def test_requests_are_spread_over_machines(tmp_path, capsys):
    config = write(tmp_path, (0, A), (0, B), (1, A), (1, B), (2, A))
    figures, lines = play(config, capsys, "machines=2")
    assert [line["machine"] for line in lines] == [0, 1, 0, 1, 0]
    assert waits(lines) == [64_000, 64_000, 16_000, 16_000, 16_000]
    assert figures["hit_tokens"]["gpu"] == 3 * 48
    _, lines = play(config, capsys, "machines=7", "router.kind=hash")
    assert len({line["machine"] for line in lines if line["id"] in {0, 2, 4}}) == 1
