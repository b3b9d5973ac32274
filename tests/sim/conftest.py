"""Fixtures of the simulator's tests."""

import json
from collections import Counter
from contextlib import contextmanager

import pytest
from hand_run import A, B, write


@pytest.fixture
def forty_requests(tmp_path):
    """Writes settings and `t.jsonl`: forty prompts of seven kinds, a millisecond apart."""

    def settings(text):
        prompts = (100 * (at * at % 11 % 7) for at in range(40))
        rows = (
            {"arrival_ns": at * 10**6, "tokens": list(range(first, first + 64))}
            for at, first in enumerate(prompts)
        )
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "sim.toml"
        path.write_text(text)
        return path

    return settings


@pytest.fixture
def ticks(monkeypatch):
    """Counts what a command would show of its runs, by the text before the count."""

    def counted(name):
        counts = Counter()

        @contextmanager
        def counting(what):
            yield lambda: counts.update([what])

        monkeypatch.setattr(name, counting)
        return counts

    return counted


@pytest.fixture
def config(tmp_path):
    """Settings of one machine with a trace of two prompts, the first of which comes again."""
    return write(tmp_path, (0, A), (1, B), (2, A))
