"""Scripted histories of the state machine that reach states which random ones seldom do."""

from test_state_machine import Machine
from witness import Shape


def test_a_block_after_a_lost_one_leaves_with_the_lease_that_wrote_it():
    """The load of a block hangs, so the block is lost. The request writes the block after it, where
    no lookup finds it; it leaves with the lease, before the load has ended."""
    machine = Machine()
    machine.open(shape=Shape(rooms=(4, 3, 3, 4), holes=False, policy="lfu"))
    after = (0, 0, 0, 0)
    for prompt in [[0, 0], [0, 2, 0, 0, 0, 0, 0]]:
        machine.serve(prompt=(0, 0, prompt), load="plan", ends=[], step=0)
    machine.begin((0, 0, list(after)), keep=1, reserve=0, load="plan", step=0)
    machine.progress(0, step=0)
    machine.fail(1, hung=True, step=0)
    machine.land_all(step=0)
    machine.commit(0, rest=True, fresh=[], step=0)
    assert after in machine.witness.living
    assert not machine.witness.lookup(after, machine.now).tokens
    machine.release(0, step=0)
    assert after not in machine.witness.living
    machine.end_hung(0, step=0)
    assert after[:2] not in machine.witness.living


def test_a_block_that_cannot_be_dropped_to_make_room_is_written():
    """The store of a sequence's last block hangs, and the block before it is lost. Later there is
    room below for one block only, so victims are dropped; but the ancestor of the block whose store
    hangs is written, although the block between the two is lost."""
    machine = Machine()
    machine.open(shape=Shape(rooms=(5, 4, 3, 9), holes=False, policy="lru"))
    for prompt, ends, step in [
        ([2, 0, 0, 0, 0, 0], [], 0),
        ([0, 0, 0, 0, 0, 0, 0, 0], ["hang", "fail"], 5),
    ]:
        machine.serve(prompt=(0, 0, prompt), load="plan", ends=ends, step=step)
    machine.begin((0, 0, [0, 1, 0, 0, 0]), keep=1, reserve=0, load="plan", step=0)
    assert (0, (2, 0), "demoted") in machine.events


def test_no_copy_leaves_the_host_for_a_store_into_a_slot_that_is_there():
    """A part of a block has come down before its store failed. The store of this part to the disk
    hangs, so the host has no slot left, not even for blocks that pass through it. When the block
    leaves the first tier, its rest takes no slot, and no other copy leaves."""
    machine = Machine()
    machine.open(shape=Shape(rooms=(5, 4, 3, 9), holes=False, policy="lru"))

    def begin(*prompt, keep=1):
        machine.begin((0, 0, list(prompt)), keep=keep, reserve=0, load="plan", step=1)

    for token in (5, 6, 7, 8):
        machine.serve(prompt=(0, 0, [token, token]), load="plan", ends=[], step=1)
    begin(0, 0)
    machine.commit(0, rest=True, fresh=[], step=0)
    machine.suspend(0, step=0)
    machine.progress(0, step=0)
    machine.fail(0, hung=False, step=0)
    begin(1, 1)
    machine.fail(0, hung=True, step=0)
    begin(2, 2, 2, 2)
    machine.land(2, step=0)
    machine.fail(1, hung=True, step=0)
    begin(8, 8, keep=0)
    assert [tier.free for tier in machine.witness.managers[0].stats().tiers.values()][:2] == [0, 0]
    begin(3, 3)
    assert machine.events == [(0, (0, 0), "demoted")]


def test_a_block_after_a_lost_one_leaves_while_the_block_between_the_two_moves():
    """Four blocks of a sequence are stored for two requests. The store of the second block hangs,
    and the block is lost. The fourth block leaves when its own store has ended, though the store of
    the third still runs."""
    machine = Machine()
    machine.open(shape=Shape(rooms=(5, 3, 4), holes=False, policy="flat"))
    machine.serve(prompt=(0, 0, [0] * 8), load="plan", ends=[], step=0)
    for prompt in [[1, 0, 0], [2, 0, 0]]:
        machine.begin((0, 0, prompt), keep=1, reserve=0, load="plan", step=0)
    machine.fail(2, hung=True, step=0)
    assert (0,) * 8 in machine.witness.living
    machine.land(0, step=0)
    assert (0,) * 8 not in machine.witness.living
    assert (0,) * 6 in machine.witness.living
