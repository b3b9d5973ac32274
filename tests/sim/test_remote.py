"""A store of all machines: runs that are worked out by hand, its table, its price."""

import json

import pytest
from hand_run import SECOND, A, B, play, write

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import read_config
from kvtrie.sim.run import open_simulation

C = list(range(200, 264))
THROUGH = "tiers.1.write=through"
LANE = "bytes_per_s=16384000, latency_ns=1000"


def remote(more="", lane=LANE):
    return f"remote={{shared=true, {lane}, {more}}}"


def waits(rows):
    return [row["first_token_ns"] - row["arrival_ns"] for row in rows]


def found(rows):
    return [row["hit_tokens"]["remote"] for row in rows]


@pytest.mark.parametrize(
    ("second", "blocks", "wait"), [(7_068_000, 3, 4_019_000), (7_067_999, 2, 3_034_000)]
)
def test_a_block_is_found_the_latency_after_it_was_written(tmp_path, capsys, second, blocks, wait):
    """By hand, in us: 64 to compute, 4000 to the host, then 1001 for each block to the store.

    So the blocks are written at 5065, 6066, 7067 and 8068, and the second machine finds them 1
    later. It reads each in 1001, the last one is on its GPU 1000 later; a missing block takes 16.
    """
    config = write(tmp_path, (0, A), (second / SECOND, A))
    _, rows = play(config, capsys, "machines=2", THROUGH, remote("blocks=100"))
    assert found(rows) == [0, 16 * blocks]
    assert waits(rows) == [64_000, wait]
    assert rows[1]["computed_tokens"] == 64 - 16 * blocks


def test_the_block_used_longest_ago_leaves_the_store_first(tmp_path, capsys):
    """By hand, the store of five blocks, the next to leave first.

    0 s, machine 0 computes A: A0 A1 A2 A3. 1 s, machine 1 finds A0 to A2 and writes A3: A2 A1 A0
    A3. 2 s, machine 2 computes B, and three leave: A3 B0 B1 B2 B3. 3 s, machine 0 finds B0 to B2:
    A3 B2 B1 B0 B3. 4 s, machine 1 has A. 5 s, machine 2 finds no A0, and four leave.
    """
    config = write(tmp_path, *((at, tokens) for at, tokens in enumerate((A, A, B, B, A, A))))
    figures, rows = play(config, capsys, "machines=3", THROUGH, remote("blocks=5"))
    assert found(rows) == [0, 48, 0, 48, 0, 0]
    assert [row["computed_tokens"] for row in rows] == [64, 16, 64, 16, 16, 64]
    store = figures["tiers"][-1]
    assert (store["kind"], store["blocks"], store["dropped"], store["clean"]) == ("remote", 5, 7, 0)
    assert (store["hits"], figures["hit_tokens"]["remote"]) == (6, 96)


@pytest.mark.parametrize(
    ("shares", "wrote", "last"),
    [("", 12_012_000, 4_019_000), (', shares="nic"', 28_028_000, 7_022_000)],
)
def test_lanes_are_of_each_machine_or_one_queue(tmp_path, capsys, shares, wrote, last):
    """By hand, in us: two machines write four blocks of 1001 each, from 4064 on.

    On two lanes the blocks of each wait 0, 1001, 2002 and 3003, in one queue all eight wait up to
    7007. At 1 s both read three blocks: on two lanes in 3003, in one queue the second in 6006.
    """
    config = write(tmp_path, (0, A), (0, B), (1, B), (1, A))
    figures, rows = play(config, capsys, "machines=2", THROUGH, remote(f"blocks=100{shares}"))
    assert figures["lanes"]["remote store"]["waited_ns"] >= wrote
    assert waits(rows) == [64_000, 64_000, 4_019_000, last]
    read = figures["lanes"]["remote read"]
    assert read["use"] == read["busy_ns"] / (figures["end_ns"] * (1 if shares else 2))


def test_a_queue_of_the_store_is_that_of_the_network_and_of_tiers_with_its_name(tmp_path, capsys):
    """The store's reads wait for those of the host, each of which carries a block in 1 ms."""
    config = write(tmp_path, (0, A), (0, B), (1, B), (1, A))
    changes = ("machines=2", THROUGH, remote('blocks=100, shares="nic"'))
    _, apart = play(config, capsys, *changes)
    _, together = play(config, capsys, *changes, "tiers.1.read.shares=nic")
    assert waits(together)[3] > waits(apart)[3] == 7_022_000


def test_local_finds_only_what_the_machine_wrote(tmp_path, capsys):
    """Both machines lose A to B; only the first one wrote it."""
    config = write(tmp_path, *((at, tokens) for at, tokens in enumerate((A, C, B, B, A, A))))
    changes = ("machines=2", "tiers.1.blocks=4", THROUGH)
    for lookup, expected in (("all", [48, 48]), ("local", [48, 0])):
        _, rows = play(config, capsys, *changes, remote(f'blocks=100, lookup="{lookup}"'))
        assert found(rows)[4:] == expected


def test_a_block_that_left_the_store_is_computed(tmp_path, capsys):
    """The first machine still takes A to be in the store, from which B and C have pushed it."""
    config = write(tmp_path, *((at, tokens) for at, tokens in enumerate((A, C, B, C, A))))
    changes = ("machines=2", "tiers.1.blocks=4", THROUGH)
    for blocks, tokens in ((100, 48), (4, 0)):
        _, rows = play(config, capsys, *changes, remote(f"blocks={blocks}"))
        assert (found(rows)[4], rows[4]["computed_tokens"]) == (tokens, 64 - tokens)


def test_one_machine_has_the_figures_of_its_own_store(tmp_path, capsys):
    config = write(tmp_path, *((at, tokens) for at, tokens in enumerate((A, B, C, A, C, B))))
    lane = f"{{{LANE}}}"
    own = f'{{kind="remote", blocks=100, policy="lru", read={lane}, store={lane}}}'
    tiers = '[{kind="gpu", blocks=4, write="through"}, {kind="host", blocks=4, write="through"}'
    alone = play(config, capsys, f"tiers={tiers}, {own}]")
    assert play(config, capsys, f"tiers={tiers}]", remote("blocks=100")) == alone
    assert alone[0]["hit_tokens"]["remote"] == 128


def test_a_peer_sends_what_the_store_lacks(tmp_path, capsys):
    """The second machine finds two blocks in the store; the first one's host sends the third."""
    config = write(tmp_path, (0, A), (0.007, A))
    peers = 'peers={lookup="all", bytes_per_s=16384000}'
    _, rows = play(config, capsys, "machines=2", THROUGH, remote("blocks=100"), peers)
    assert (found(rows), [row["hit_tokens"]["peer"] for row in rows]) == ([0, 32], [0, 16])


@pytest.mark.parametrize("directory", ['{kind="exact"}', '{kind="events"}'])
def test_routers_leave_out_what_every_machine_can_have(tmp_path, capsys, directory):
    """Only the second machine wrote A, which it has lost: the first one finds it as well."""
    trace = ((0, B), (0.00001, A), (1, C), (1.00001, C), (2, A))
    changes = ("machines=2", "tiers.1.blocks=4", THROUGH, remote("blocks=100"))
    router = ('router={kind="locality", ratio=1.0}', f"directory={directory}")
    _, rows = play(write(tmp_path, *trace), capsys, *changes, *router)
    assert [row["machine"] for row in rows] == [0, 1, 0, 1, 0]
    assert found(rows) == [0, 0, 0, 0, 48]


def test_all_engines_and_a_prefetch_find_the_store(tmp_path, capsys):
    config = write(tmp_path, (0, A), (0, B), (1, B), (1, A))
    changes = ("machines=2", THROUGH, remote("blocks=100"))
    for engine in ("serial", "continuous"):
        for prefetch in ("never", "arrival"):
            more = (f"engine.kind={engine}", f"prefetch={prefetch}", "tiers.0.blocks=20")
            figures, rows = play(config, capsys, *changes, *more)
            assert [row["computed_tokens"] for row in rows] == [64, 64, 16, 16]
            assert figures["lanes"]["remote read"]["bytes"] == 6 << 14


def test_the_store_is_paid_once(tmp_path, capsys):
    config = write(tmp_path, (0, A), (0, B))
    price = "price={gpu_hour=2.0, gib_hour={host=16.0, remote=1024.0}}"
    seen = read_config(config, ["machines=3", remote("blocks=128"), price])
    # 64 blocks of 16 KiB are a MiB.
    assert seen.rooms() == [12, 192, 128]
    assert seen.room_bytes() == (12 + 192 + 128) << 14
    assert seen.per_hour() == 3 * 2.0 + 3 * 16.0 / 1024 + 2.0
    over = ["--over", "remote.blocks=64,128", "--set", "machines=3", "--set", price]
    over += ["--set", remote("blocks=1"), "--set", THROUGH, "--json"]
    assert main(["sim", "sweep", str(config), *over]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in rows] == [{"remote.blocks": 64}, {"remote.blocks": 128}]
    hours = [row["figures"]["cost"]["per_hour"] for row in rows]
    assert hours[1] - hours[0] == 1.0


def test_a_sweep_shows_what_a_larger_store_finds_for_its_price(tmp_path, capsys):
    trace = [(at, tokens) for at, tokens in enumerate((A, B, C, A, B, C) * 2)]
    config = write(tmp_path, *trace)
    words = ["sim", "sweep", str(config), "--over", "remote.blocks=4,8,16", "--json"]
    for change in ("machines=2", "tiers.1.blocks=4", THROUGH, remote("blocks=1")):
        words += ["--set", change]
    assert main(words) == 0
    rows = [row["figures"] for row in json.loads(capsys.readouterr().out)]
    tokens = [row["hit_tokens"]["remote"] for row in rows]
    assert tokens[0] < tokens[1] < tokens[2]


def test_lanes_come_from_a_file_where_the_table_has_none(tmp_path):
    config = write(tmp_path, (0, A))
    (tmp_path / "lanes.toml").write_text(
        '[lanes."remote read"]\nbytes_per_s = 5000\nlatency_ns = 7\n'
        '[lanes."remote store"]\nbytes_per_s = 3000\nlatency_ns = 9\n'
    )
    lanes = 'lanes={path="lanes.toml"}'

    def seen(given):
        store = read_config(config, [given, lanes]).shared
        assert store is not None
        return [(lane.bytes_per_s, lane.latency_ns, lane.shares) for lane in store.lanes()]

    assert seen("remote={blocks=9}") == [(5000, 7, None), (3000, 9, None)]
    assert seen('remote={blocks=9, shares="nic"}') == [(5000, 7, "nic"), (3000, 9, "nic")]
    assert seen(remote("blocks=9")) == [(16_384_000, 1000, None)] * 2


TIERS = '[{kind="gpu", blocks=4}, {kind="host", blocks=4}, {kind="remote", blocks=9}]'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [f"tiers={TIERS}", "machines=3", remote("blocks=50")],
            "tiers.2 is 'remote', a store of one machine, and remote is a store of 50 blocks for",
        ),
        (["remote=5"], "remote is 5, a table wanted"),
        (["remote={shared=false, blocks=5}"], "remote.shared is False, True wanted"),
        (["remote={shared=1, blocks=5}"], "remote.shared is 1"),
        (["remote={}"], "remote: tier 'remote' needs room as blocks or as bytes"),
        ([remote("blocks=0")], "blocks of tier 'remote' is 0"),
        ([remote('blocks=5, lookup="own"')], "remote.lookup is one of all, local, not 'own'"),
        ([remote("blocks=5, path='x'")], "remote.path is 'x', but there is no such key"),
        ([remote("blocks=5", "bytes_per_s=0")], "bytes_per_s of lane 'remote read' is 0"),
        ([remote("blocks=5", "latency_ns=-1")], "latency_ns of lane 'remote read' is -1"),
        (['tiers=[{kind="gpu", blocks=4}]', remote("blocks=5")], "'host', which is missing"),
        (
            [remote('blocks=5, shares="nic"'), "transfer=predicted"],
            "share nic with the network or other machines",
        ),
        (["model={name='gemma-3-27b'}", remote("blocks=5000")], "no shared store wanted"),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_is_refused(tmp_path, changes, message):
    config = write(tmp_path, (0, A))
    with pytest.raises(ConfigError) as error:
        open_simulation(read_config(config, changes))
    assert message in str(error.value)
