"""Ranks with the same KV: a machine's ranks share out the slots; the first one has the disk."""

import numpy as np
import pytest

from kvtrie.engines.vllm import replicated
from kvtrie.engines.vllm.replicated import ReplicatedRanks


@pytest.mark.parametrize("machines", ["aaaa", "aabb", "abab", "abcd", "a"])
def test_the_ranks_of_a_machine_part_every_slot_among_them(machines, monkeypatch):
    found = {}
    for rank, name in enumerate(machines):
        monkeypatch.setattr(replicated, "machine", lambda name=name: name)

        def gather(value, name=name):
            assert value == name
            return list(machines)

        found[rank] = ReplicatedRanks.of(rank, gather)
    slots = np.arange(40, dtype=np.uint32)
    for name in set(machines):
        mine = [found[rank] for rank, other in enumerate(machines) if other == name]
        assert [each.place for each in mine] == list(range(len(mine)))
        assert {(each.count, each.first) for each in mine} == {(len(mine), machines.index(name))}
        filled = sum(each.stores(slots).astype(int) for each in mine)
        assert (filled == 1).all()
