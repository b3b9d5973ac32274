"""RunningRequest: an admitted request, its lease, and its tokens that are surely written.

Invariant: a committed block was written by a step that has finished, and is in a slot that the
request owned then. Cost: a comparison of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtrie import Lease
    from kvtrie.engines.vllm.page_slots import PageSlots
    from kvtrie.engines.vllm.sequence import RequestSequence

__all__ = ["RunningRequest"]


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that vLLM has given blocks to.

    Attributes:
        request: vLLM's `Request`.
        sequence: its tokens, as the manager has them.
        lease: kvtrie's hold.
        slots: the slots of vLLM's memory.
        tables: by group, its slots by place; 0 where vLLM keeps none. Those of native blocks name
            their parts.
        loose: by group, vLLM's blocks after them, which make up no whole slot yet.
        begun: the step that admitted it.
        prompt: tokens of the request's prompt then; a further input of a session adds to them.
        identity: the name of the weights and adapter that it was admitted under.
        full: the length of the manager's sequence with which a further block is full.
        written: the length of that sequence that finished steps have written.
        stopped: a load of it has failed: nothing of it is committed any more.
        drafted: whether its last planned step was to verify drafts.
        receiving: whether vLLM waits for its loads before it computes anything.
        states: states that steps under way write: the step, group, place and slot.
        shares: whether its blocks become shared among tenants.
    """

    request: Request
    sequence: RequestSequence
    lease: Lease
    slots: PageSlots
    tables: list[list[int]]
    loose: list[list[int]]
    begun: int
    prompt: int
    identity: str | None
    full: int
    written: int = 0
    stopped: bool = False
    drafted: bool = False
    receiving: bool = False
    states: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    shares: bool = False

    @property
    def table(self) -> list[int]:
        """Its slots in the first group."""
        return self.tables[0]

    def had(self, group: int) -> int:
        """Number of vLLM's blocks of a group that it has."""
        return len(self.tables[group]) * self.slots.wide(group) + len(self.loose[group])

    def grow(self, group: int, blocks: list[int], loads: range = range(0)) -> None:
        """Add vLLM's blocks of a group, and name the slots that they make up to the manager.

        Args:
            group: the group.
            blocks: vLLM's blocks.
            loads: places that are loaded, in which the first blocks may have been dropped.
        """
        table, wide = self.tables[group], self.slots.wide(group)
        slots, first = blocks, len(table)
        if wide > 1:
            blocks = self.loose[group] + blocks
            whole = len(blocks) // wide * wide
            self.loose[group] = blocks[whole:]
            partial = range(loads.start - first, loads.stop - first)
            slots = self.slots.name(group, blocks[:whole], partial)
        table += slots if group else self.sequence.slots(slots, first)
        self.bind(group, first)

    def end_slots(self) -> None:
        """End the use of its slots: its lease has ended."""
        for group, table in enumerate(self.tables):
            self.slots.end(group, table)

    def forget_parted(self, first: int) -> None:
        """Forget the slots of several pages before a block: vLLM may have dropped some of them.

        vLLM drops the pages of a window one by one. Those that a resume at the end of their block
        needs are there until the block is committed, and maybe no longer.
        """
        for group in range(1, len(self.tables)):
            if self.slots.wide(group) > 1:
                self.lease.unbind(first, group)

    def bind(self, group: int, first: int) -> None:
        """Name the slots of a group from a place on to the manager."""
        table = self.tables[group]
        while first < len(table):
            if not table[first]:
                first += 1
                continue
            end = next((at for at in range(first, len(table)) if not table[at]), len(table))
            self.lease.bind(first, table[first:end], group)
            first = end

    def committable(self) -> int:
        """Length of the sequence that finished steps have written, and that the request still has.

        The next input of a session replaces the token that was sampled last, and a step under way
        may have written that one already. vLLM keeps the tokens that it counts as computed.
        """
        sure = min(self.written, self.sequence.surely_written())
        if self.request.num_prompt_tokens != self.prompt:
            sure = min(sure, self.sequence.computed())
        return sure
