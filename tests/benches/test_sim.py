"""The simulator's bench: what is measured beside what, and what is missing is said."""

import json

import pytest

from benches.core.referee import Line
from benches.ours import simulation
from benches.sim import __main__ as program
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations


def test_each_set_of_machines_is_measured(tmp_path, monkeypatch, capsys):
    write_trace(tmp_path / "trace.jsonl", conversations(seed=2))
    monkeypatch.setattr("sys.argv", ["simulation", str(tmp_path / "trace.jsonl")])
    simulation.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["what"] for line in lines] == list(program.GOALS)
    assert all(line["value"] > 0 and line["found"] > 0 for line in lines)


@pytest.mark.parametrize("there", [True, False])
def test_ratios_are_of_processor_seconds(tmp_path, monkeypatch, there):
    def run(play):
        seconds = 1.0 if play.environment == "kvtrie" else 9.0
        return [Line(play.environment, what, seconds, "s", {}) for what in program.GOALS]

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program, "interpreter", lambda _: tmp_path if there else None)
    rows, said = program.beside(tmp_path)
    assert [row.ok for row in rows] == ([False, True, True, True] if there else [None] * 4)
    assert [row.ratio for row in rows] == [9.0 if there else None] * 4
    assert bool(said) is not there
