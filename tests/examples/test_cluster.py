"""The cluster example: right blocks and answers from three engines, with one killed on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests import namespace

from examples.cluster import model
from examples.cluster.kv import prefill
from examples.cluster.processes import DYNAMO
from examples.cluster.routers import RoundRobin
from kvtrie import NoMachineError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.cluster"]


def run(*arguments):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not DYNAMO.exists(), reason="no Dynamo: make peers ARGS=dynamo")
@pytest.mark.skipif(not namespace.possible(), reason="this user may make no network namespace")
def test_every_block_is_right_and_the_selector_computes_less(tmp_path):
    picture = tmp_path / "cluster.png"
    ended = run("--json", "--chats", 9, "--turns", 6, "--plot", picture)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads(ended.stdout)
    assert (report["wrong"], report["unanswered"]) == (0, 0)
    assert report["ratio"]["selector"] >= 1.5
    assert report["ratio"]["index"] >= 1.5
    for name, play in report["plays"].items():
        assert len(play["turns"]) == 54
        assert bool(play["marks"]) == name.endswith("killed")
        for turn in play["turns"]:
            machines = turn["machines"]
            assert all(one != other for one, other in pairwise(machines))
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--chats", 0), 2, "--chats and --turns are at least 1"),
        (("--dynamo", "/nowhere"), 1, "/nowhere is not there: make peers ARGS=dynamo"),
    ],
)
def test_a_wrong_argument_is_named(arguments, status, said):
    ended = run(*arguments)
    assert ended.returncode == status
    assert said in ended.stderr


def test_kv_of_a_block_depends_on_all_tokens_before():
    tokens = list(range(3 * model.SIZE))
    kv, other = prefill(tokens), prefill([9, *tokens[1:]])
    assert kv.shape == (model.SHAPE.layers, 2, len(tokens), 1, model.SHAPE.head_dim)
    assert (kv[:, :, : model.SIZE] == prefill(tokens[: model.SIZE])).all()
    for block in range(3):
        at = slice(block * model.SIZE, (block + 1) * model.SIZE)
        assert (kv[:, :, at] != other[:, :, at]).any()


def test_round_robin_leaves_a_machine_out_after_a_failure():
    router = RoundRobin(2)
    first = router.pick("a", [])
    router.done("a", failed=True)
    assert [router.pick(name, []) for name in "bc"] == [1 - first] * 2
    router.done("b", failed=True)
    with pytest.raises(NoMachineError, match="all 2 machines rest"):
        router.pick("d", [])
