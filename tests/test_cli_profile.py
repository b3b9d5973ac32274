"""`kvtrie profile`: managers and lanes take the file that it writes. Nothing asserts a time."""

from functools import partial

import pytest
from tqdm import tqdm

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.cli import main
from kvtrie.demo.model import from_folder, tiny
from kvtrie.errors import ConfigError
from kvtrie.fuse.profile import load_profile
from kvtrie.sim.passes import read_passes
from kvtrie.tiers.remote import check


def test_a_profile_is_measured_and_taken(tmp_path, capsys):
    out = tmp_path / "p.toml"
    words = f"profile --model tiny --longest 32 --blocks 4 --repeats 2 --disk {tmp_path / 'new'}"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert "host read" in capsys.readouterr().out
    profile = load_profile(out)
    assert [at for at, _ in profile.cost.table] == [0, 16, 32]
    assert set(profile.lanes) == {"host read", "host store", "disk read", "disk store"}
    assert set(profile.both) == {"host", "disk"}
    assert (profile.passes.contexts, profile.passes.tokens) == ((0, 16), (1, 4))
    assert min(profile.device) > 0
    assert read_passes(out).decode[:2] == ([0, 16], [1, 4, 8])
    lanes = {"read": profile.lanes["host read"], "store": profile.lanes["host store"]}
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4, **lanes)]
    manager = BlockManager(ModelShape(2, 1, 4), tiers, cost=profile.cost)
    assert manager.tiers[1].lanes()[0].bytes_per_s == profile.lanes["host read"].bytes_per_s


def test_any_folder_with_a_model_is_profiled(tmp_path, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread never ends
    model = tiny(1).model
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "p.toml"
    words = f"profile --model {tmp_path / 'model'} --longest 16 --blocks 2 --repeats 2 --json"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert load_profile(out).passes.pass_ns(4, 8) > 0
    with pytest.raises(ConfigError, match="no causal language model"):
        from_folder(tmp_path / "none")


def test_a_profile_may_hold_the_lanes_of_a_shared_store(tmp_path, monkeypatch, capsys):
    fewer = partial(check.check_store, sizes=(1 << 16, 1 << 20), repeats=1)
    monkeypatch.setattr(check, "check_store", fewer)
    out = tmp_path / "p.toml"
    words = f"profile --model none --blocks 2 --repeats 2 --remote folder:{tmp_path / 'kv'}"
    assert main([*words.split(), "--out", str(out)]) == 0
    lanes = load_profile(out).lanes
    assert set(lanes) == {"host read", "host store", "remote read", "remote store"}
    tier = Tier(
        "remote", blocks=4, read=lanes["remote read"], store=lanes["remote store"], path="folder:kv"
    )
    assert tier.lanes()[0].bytes_per_s > 1
    (tmp_path / "file").touch()
    assert main(["profile", "--model", "none", "--remote", f"folder:{tmp_path / 'file'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
