"""RunningRequest: an admitted request, its lease, and the length of its written tokens.

Invariant: a committed block was written by a finished step, into a slot owned by the request at
that time. Cost: a comparison of numbers.
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
    """A request with blocks in vLLM's memory.

    Attributes:
        request: vLLM's `Request`.
        sequence: its tokens, in the manager's sequence.
        lease: its lease.
        slots: the slots of vLLM's memory.
        tables: by group, the slots of its blocks, 0 for a block freed by vLLM. Slots of native
            blocks name their parts.
        loose: by group, vLLM's blocks after them, too few for a whole slot.
        admitted_step: the step of its admission.
        prompt: tokens of the request's prompt at admission. Further inputs of a session add tokens.
        identity: the name of the weights and adapter at admission.
        full: the manager's sequence length at which its next block is full.
        written: the length of the sequence written by finished steps.
        stopped: whether its commits have ended, after a failed load or a change of weights.
        drafted: whether its last planned step verifies draft tokens.
        receiving: whether vLLM waits for its loads before computing anything.
        states: states written by steps in flight: the step, group, place and slot.
        shares: whether its blocks become shared among tenants.
    """

    request: Request
    sequence: RequestSequence
    lease: Lease
    slots: PageSlots
    tables: list[list[int]]
    loose: list[list[int]]
    admitted_step: int
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
        """Return the number of its vLLM blocks of a group."""
        return len(self.tables[group]) * self.slots.wide(group) + len(self.loose[group])

    def grow(self, group: int, blocks: list[int], loads: range = range(0)) -> None:
        """Add vLLM's blocks of a group, and bind their whole slots to the lease.

        Args:
            group: the group.
            blocks: vLLM's blocks.
            loads: loaded places, where vLLM may have dropped the first blocks.
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
        """End the use of its slots, after the end of its lease."""
        for group, table in enumerate(self.tables):
            self.slots.end(group, table)

    def unbind_multi_slot_pages(self, first: int) -> None:
        """Unbind the slots of several pages before a block: vLLM may have dropped some pages.

        vLLM drops the pages of a window singly. The pages for a resume at the end of their block
        are only sure to be present until the block is committed.
        """
        for group in range(1, len(self.tables)):
            if self.slots.wide(group) > 1:
                self.lease.unbind(first, group)

    def bind(self, group: int, first: int) -> None:
        """Bind the slots of a group from a place on to the lease."""
        table = self.tables[group]
        if (new := table[first:]) and 0 not in new:  # the usual case
            self.lease.bind(first, new, group)
            return
        while first < len(table):
            if not table[first]:
                first += 1
                continue
            end = next((at for at in range(first, len(table)) if not table[at]), len(table))
            self.lease.bind(first, table[first:end], group)
            first = end

    def committable(self) -> int:
        """Return the length of the request's sequence written by finished steps.

        The next input of a session replaces the last sampled token, and a step in flight may
        already have written it. vLLM keeps the tokens counted as computed.
        """
        sure = min(self.written, self.sequence.surely_written())
        if self.request.num_prompt_tokens != self.prompt:
            sure = min(sure, self.sequence.computed())
        return sure
