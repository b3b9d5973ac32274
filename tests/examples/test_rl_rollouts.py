"""The example of a trainer: rewards, no stale token, few prompt tokens computed."""

import json
import sys

import pytest

from examples.rl_rollouts import __main__ as rl_rollouts
from examples.rl_rollouts import grpo


def test_rollouts_of_changing_weights_compute_few_prompt_tokens_and_none_is_stale(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["rl_rollouts", "--updates", "3", "--json"])
    assert rl_rollouts.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert [one["update"] for one in figures] == [0, 1, 2]
    assert sum(one["stale"] + one["differ"] for one in figures) == 0
    computed = sum(one["computed"] for one in figures)
    assert 0 < computed <= 0.4 * sum(one["prompt_tokens"] for one in figures)
    assert figures[-1]["reward"] > figures[0]["reward"]


@pytest.mark.parametrize("wrong", [{"stale": 1}, {"differ": 1}, {"computed": 41}])
def test_a_stale_token_a_different_one_or_too_many_computed_are_no_success(monkeypatch, wrong):
    right = {"update": 0, "reward": 0.5, "prompt_tokens": 100, "computed": 40}
    right |= {"stale": 0, "differ": 0}
    monkeypatch.setattr(sys, "argv", ["rl_rollouts"])
    monkeypatch.setattr(rl_rollouts, "train", lambda *_: [grpo.Figures(**right)])
    assert rl_rollouts.main() == 0
    monkeypatch.setattr(rl_rollouts, "train", lambda *_: [grpo.Figures(**right | wrong)])
    assert rl_rollouts.main() == 1
