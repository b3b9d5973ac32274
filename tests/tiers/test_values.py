"""Reads of values: every block is verified, on its arrival or after the call of the store."""

from contextlib import closing

import numpy as np
import pytest
import torch
from respserver import RespServer
from shelf import TOKENS, Shelf, kv, labelled, storage_of
from store_calls import StoreCalls, name, soon

from kvtrie.tiers.remote import Get


class ArrivingShelf(Shelf):
    """A store that reports each value on its arrival."""

    def get_many(self, rows, deadline):
        return [self._one(row, deadline) for row in rows]

    def _one(self, row, deadline):
        (result,) = super().get_many([row], deadline)
        if result.outcome == "ok":
            row.arrived()
        return result


@pytest.mark.parametrize("kind", [Shelf, ArrivingShelf])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_value_is_found_on_its_arrival_or_after_the_call(kind, damaged):
    store = kind()
    storage = storage_of(store)
    keys, labels = labelled(TOKENS)
    blocks = [(key, 0, (0, 3), kv(at)) for at, key in enumerate(keys)]
    storage.write_many([(*block, label) for block, label in zip(blocks, labels, strict=True)])
    at = list(store.values)[damaged]
    store.values[at] = store.values[at][:-1] + bytes([store.values[at][-1] ^ 1])
    read = [(*block[:3], torch.zeros_like(block[3])) for block in blocks]
    why = storage.read_many(read)
    assert [reason is None for reason in why] == [damaged == 1, damaged == 0]
    assert why[damaged].startswith("damaged: ")
    assert torch.equal(read[1 - damaged][3], blocks[1 - damaged][3])
    assert at not in store.values


def test_redis_reports_a_value_before_the_next_value_is_read():
    pytest.importorskip("redis")
    calls, arrivals = StoreCalls(3, 5000), []
    memory = np.zeros((4, 3, 5000), np.uint8)
    rows = [
        Get(
            name(at),
            (0, 3),
            np.zeros(calls.form.header_bytes, np.uint8),
            memory[at],
            lambda: arrivals.append(memory.any((1, 2)).tolist()),
        )
        for at in range(4)
    ]
    with RespServer() as server, closing(calls.opened(f"redis://127.0.0.1:{server.port}")) as store:
        calls.put(store, 0, 2, 3)
        found = [result.outcome for result in store.get_many(rows, soon())]
    assert found == ["ok", "missing", "ok", "ok"]
    assert arrivals == [
        [True, False, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]
