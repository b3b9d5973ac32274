"""Executors and disk tiers belong to their process: a fork can neither use nor harm them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import BLOCKS, PATIENCE_S
from rig import SHAPE, SIZE, fetch, prompt

from kvtrie import BlockManager, Tier
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_from_a_fork_every_call_is_refused_and_nothing_changes(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(HERE / "forked.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
    )
    assert ran.stdout, ran.stderr
    news = json.loads(ran.stdout.splitlines()[-1])
    parent, child = news["pids"]
    for name, raised in news["raised"].items():
        assert raised is not None, name
        kind, message = raised
        assert (name, kind) == (name, "ConfigError")
        assert f"process {parent} " in message, name
        assert f"process {child} " in message, name
    assert len(news["raised"]) > 20
    assert news["status"] == 0, ran.stderr
    assert news["same"]

    # The parent was killed: the next process finds what it has kept, bit for bit.
    tiers = [Tier("gpu", blocks=16), Tier("host", blocks=32), Tier("disk", blocks=64)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE)
    with DiskStorage(tmp_path, SHAPE, 64, SIZE) as disk:
        assert not disk.read_only
        with Executor(manager, [*pools[:2], disk]) as executor:
            assert executor.restore() == BLOCKS
            for seed in range(BLOCKS // 3):
                generator = torch.Generator().manual_seed(seed)
                kv = [torch.randn(2, 3 * SIZE, 2, 4, generator=generator) for _ in range(4)]
                assert torch.equal(fetch(executor, prompt(seed, 3)), torch.stack(kv))
