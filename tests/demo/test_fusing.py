"""`kvtrie fuse`: what it prints, draws and refuses, on the random model."""

import json

import pytest
import torch

from kvtrie.cli import main
from kvtrie.demo import fusing
from kvtrie.fuse import DeviationProfile

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_demo_compares_three_ways_and_draws_one(tmp_path, capsys):
    picture = tmp_path / "fuse.png"
    status = main(["fuse", "--demo", "--tiny", "--plot", str(picture), "--json"])
    document = json.loads(capsys.readouterr().out)
    full, reuse, fusion = document["ways"]
    assert [way["name"] for way in document["ways"]] == ["full prefill", "plain reuse", "fusion"]
    assert document["ok"] == (fusion["kl"] < reuse["kl"])
    assert status == (0 if document["ok"] else 1)
    assert (full["kl"], full["computed"], reuse["computed"]) == (0, 1, 0)
    assert fusion["computed"] == pytest.approx(0.15, abs=0.01)
    assert [chunk["state"] for chunk in document["log"]["chunks"]] == ["hit"] * 6
    assert document["log"]["load_ns"] > 0  # the passages came from below
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_passages_of_ones_own_and_a_ratio_of_one(tmp_path, capsys):
    files = []
    for at, text in enumerate(("one two three four", "five six seven", "eight nine")):
        files.append(tmp_path / f"{at}.txt")
        files[-1].write_text(text)
    given = [*map(str, files), "--question", "ten eleven", "--tiny", "--ratio", "1"]
    assert main(["fuse", *given]) == 0
    out = capsys.readouterr().out
    assert "3 passages of 9" in out
    assert "full prefill" in out
    table = [line.split() for line in out.splitlines() if line.strip().startswith("fusion")]
    assert table[0][5] == "0.0000"  # KL


def test_a_disk_keeps_the_passages_for_the_next_run(tmp_path, capsys):
    def run(*more):
        words = ["fuse", "--demo", "--tiny", "--json", "--answer-tokens", "1", *more]
        assert main([*words, "--plot", str(tmp_path / "x.png")]) in {0, 1}
        return json.loads(capsys.readouterr().out)

    disk = f"disk:{tmp_path}/kv:20MB"
    first, again = run("--tier", disk), run("--tier", disk)
    assert (first["known"], again["known"]) == (0, 6)
    assert [chunk["state"] for chunk in again["log"]["chunks"]] == ["hit"] * 6
    assert [way["kl"] for way in again["ways"]] == [way["kl"] for way in first["ways"]]
    assert again["log"]["load_ns"] > 0
    assert run()["known"] == 0


def test_one_file_is_cut_into_passages(tmp_path, capsys):
    path = tmp_path / "all.txt"
    path.write_text(" ".join(f"word{at}" for at in range(300)))
    words = ["fuse", str(path), "--question", "ten eleven", "--tiny", "--json"]

    def passages(*more):
        assert main([*words, "--answer-tokens", "1", *more]) in {0, 1}
        return json.loads(capsys.readouterr().out)["tokens"]

    usual, small = passages(), passages("--split", "100")
    assert sum(usual) == sum(small) == 300
    assert (len(usual), max(usual) <= 256) == (2, True)
    assert len(small) >= 3
    assert max(small) <= 100
    disk = f"disk:{tmp_path}/kv:9MB"
    for known in (0, len(small)):
        assert main([*words, "--split", "100", "--answer-tokens", "1", "--tier", disk]) in {0, 1}
        assert json.loads(capsys.readouterr().out)["known"] == known


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tier", "tape"], "--tier is one of gpu, host, disk, not 'tape'"),
        (["--tier", "host:x:1GB"], "--tier is 'host:x:1GB', gpu, host or disk:PATH:SIZE wanted"),
        (["--tier", "disk:"], "--tier disk: is '', PATH:SIZE wanted"),
        (["--tier", "disk:kv:9"], "did you mean '9GB'"),
        (["--split", "0"], "size is 0"),
    ],
)
def test_a_tier_or_size_that_cannot_be_is_refused(tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    assert main(["fuse", "--demo", "--tiny", *more]) == 2
    assert said in capsys.readouterr().out.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_go_together_is_refused(tmp_path, capsys):
    for given in ([], ["--demo", "x.txt", "--question", "?"], ["x.txt"], ["--question", "?"]):
        assert main(["fuse", *given]) == 2
        assert "give files with a --question, or --demo" in capsys.readouterr().err
    assert main(["fuse", str(tmp_path / "none.txt"), "--question", "?", "--tiny"]) == 2
    assert "cannot read the passage" in capsys.readouterr().out
    assert main(["fuse", "--demo", "--tiny", "--select", "best"]) == 2
    assert "no selection is called best" in capsys.readouterr().out


def test_the_names_in_the_passages_end_one_and_their_facts_begin_the_next():
    assert fusing.PASSAGES[0].endswith("The access code of Bergen")
    assert fusing.PASSAGES[1].startswith(" is 4821.")
    assert sorted(fusing.FAMILIAR) == list(range(len(fusing.PASSAGES)))


def test_the_controller_monitor_and_tier_of_the_command_act(tmp_path, capsys, monkeypatch):
    import json

    from kvtrie.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(
        "[passes]\ncontexts = [0, 512]\ntokens = [1, 512]\nns = [[1.0, 8.0], [1.0, 8.0]]\n"
    )
    words = ["fuse", "--demo", "--tiny", "--json", "--monitor", "--answer-tokens", "1"]
    assert main([*words, "--controller", "p.toml"]) in {0, 1}
    found = json.loads(capsys.readouterr().out)
    assert found["quality"]["how"] == "full prefill"
    assert found["log"]["ratio"] == 1  # passes of no time: all is recomputed while it loads
    assert main([*words, "--controller", "p.toml", "--tier", "gpu"]) in {0, 1}
    assert json.loads(capsys.readouterr().out)["log"]["ratio"] == 0.15  # nothing loads


def test_a_profile_that_one_run_measures_chooses_the_tokens_of_the_next(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path, words = (
        tmp_path / "p.json",
        ["fuse", "--demo", "--tiny", "--json", "--answer-tokens", "1"],
    )
    assert main([*words, "--measure", str(path)]) in {0, 1}
    capsys.readouterr()
    profile = DeviationProfile.read(path)
    assert main([*words, "--deviation", str(path)]) in {0, 1}
    found = json.loads(capsys.readouterr().out)["log"]
    assert found["ratio"] == profile.shares[0]
    assert found["shares"] == pytest.approx(profile.shares, abs=0.01)
    assert main([*words, "--deviation", str(path), "--ratio", "0.2"]) in {0, 1}
    assert json.loads(capsys.readouterr().out)["log"]["ratio"] == 0.2
    assert main([*words, "--deviation", str(path), "--select", "first"]) == 2
    assert "leave --select out" in capsys.readouterr().err
    assert main([*words, "--deviation", str(tmp_path / "none")]) == 2
    assert "cannot read the deviation profile" in capsys.readouterr().err
