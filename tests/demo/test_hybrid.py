"""The demo of hybrid models: equal answers, bytes and a map per group."""

import json

import pytest

from kvtrie.cli import main
from kvtrie.demo import hybrid

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["gemma-3", "lfm2"])
def test_a_family_answers_from_both_tiers_as_without(name):
    run = hybrid.run_family(name)
    assert (run.answers, run.different) == (20, 0)
    assert run.found > run.tokens / 2
    assert run.map is not None
    assert len(run.map) == len(run.groups)
    if name == "gemma-3":
        assert run.loaded > 0
        assert run.held < run.all_layers
        full, window = run.map
        assert window.count(".") > full.count(".")


def test_the_command_prints_figures_of_each_family(capsys, monkeypatch):
    monkeypatch.setattr(hybrid, "FAMILIES", {"gemma-3": hybrid.FAMILIES["gemma-3"]})
    monkeypatch.setattr(hybrid, "_ROUNDS", 1)
    assert main(["demo", "--hybrid", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["different"]) == ("gemma-3", 0)
    assert main(["demo", "--hybrid"]) == 0
    assert "every answer is the model's own" in capsys.readouterr().out
