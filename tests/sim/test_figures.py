"""`figures_of`: goodput, cost and saturation of a run."""

import json

import pytest
from hand_run import play, write


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
    # The n-th request waits for 4 us n times.
    late = 4_000 * sum(range(100)) / figures["end_ns"] if saturated else 0.0
    assert figures["queue"] == late
