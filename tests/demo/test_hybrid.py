"""The demo of hybrid models: equal answers, bytes and a map per group."""

import json

import pytest

from kvtrie.cli import main
from kvtrie.demo import hybrid

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["gemma-3", "lfm2"])
def test_a_family_answers_from_all_tiers_and_after_a_restart_as_without(name):
    run = hybrid.run_family(name)
    assert (run.answers, run.different) == (20, 0)
    assert run.found > run.tokens / 2
    assert min(run.loaded, run.from_disk, run.restored) > 0
    assert len(run.map) == len(run.groups)
    assert run.held < run.all_layers
    full, other = run.map
    assert other.count(".") > full.count(".")
    assert set(full) <= set("ghd")


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(set(hybrid.FAMILIES) - {"gemma-3", "lfm2"}))
def test_every_family_answers_as_without(name):
    run = hybrid.run_family(name)
    assert (run.answers, run.different) == (20, 0)
    assert min(run.found, run.from_disk, run.restored) > 0


def test_the_command_prints_figures_of_each_family(capsys, monkeypatch):
    monkeypatch.setattr(hybrid, "FAMILIES", {"gemma-3": hybrid.FAMILIES["gemma-3"]})
    monkeypatch.setattr(hybrid, "_ROUNDS", 1)
    assert main(["demo", "--hybrid", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["different"]) == ("gemma-3", 0)
    assert main(["demo", "--hybrid"]) == 0
    assert "every answer is the model's own" in capsys.readouterr().out
