"""Readers of our events know what managers have, through lost batches, restarts and late starts.

`make test-agreement` plays all rounds and prints the table.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from dynamo_services import PYTHON
from tests import namespace
from tests.cluster.agreement import INDEXER, READER, play


def test_a_reader_agrees_with_the_managers():
    table = play(15, 1, indexer=False)
    assert table[READER] == table[READER] | {"asked": 1080, "equal": 1080, "less": 0, "more": 0}
    assert table[READER]["found"] > 500


@pytest.mark.skipif(not PYTHON.exists(), reason="no Dynamo: make peers ARGS=dynamo")
@pytest.mark.skipif(not namespace.possible(), reason="this user may make no network namespace")
@pytest.mark.parametrize("rounds", [pytest.param(140, marks=pytest.mark.deep), 5])
def test_dynamos_indexer_agrees_with_the_managers(rounds):
    ended = namespace.run(
        "tests.cluster.agreement",
        *("--json", "--rounds", rounds, "--seed", 2),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == 0
    table = json.loads(ended.stdout)
    for who in (READER, INDEXER):
        assert table[who]["asked"] == table[who]["equal"] == 72 * rounds
        assert table[who]["found"] > 36 * rounds
