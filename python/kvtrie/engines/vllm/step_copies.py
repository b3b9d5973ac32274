"""StepCopies: the copies of a step between vLLM's memory and host memory, on three streams.

Loads run on a load stream, up to two layers before the layer that computes; stores on a store
stream, each layer after its computation. Events order them with vLLM's own stream:

- loads and stores follow what vLLM's stream was given before them;
- vLLM's stream waits for the event of a layer's load before the layer reads it, and for no other;
- vLLM's stream waits for stores in flight before a step that may write blocks that they read: one
  whose orders say that vLLM has taken blocks back.

Without a GPU the calling thread makes the copies in the same order, each layer's loads just before
it reads, and nothing waits.
Invariant: every move is reported once, after its stream has passed the copy; a slot whose load has
failed is reported to vLLM in the same step. Cost: per layer that is copied a call and two events.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.engines.vllm.device_reports import DeviceReports
from kvtrie.transfer.layer_copies import LayerCopies
from kvtrie.transfer.report import MoveReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.tiers import Pool
    from kvtrie.transfer.copy_stream import CopyStream

__all__ = ["StepCopies"]

_LOOK_AHEAD = 2  # layers, as of `Layerwise`
_ABORTED = "the step was aborted before it was copied"


@dataclass(slots=True)
class _Copying:
    """Moves of one group of layers and their copies.

    Attributes:
        ids: int64 `(blocks,)`, the moves.
        slots: `(blocks,)`, destination slots.
        copies: the copies.
        places: places of the group's layers in the order of computation.
    """

    ids: NDArray[np.uint64]
    slots: NDArray[np.uint32]
    copies: LayerCopies
    places: Sequence[int]

    def wide(self, upto: int) -> int:
        """Number of the group's layers before the layer `upto` of the model."""
        return bisect_left(self.places, upto)


class StepCopies:
    """Copies of one step after another.

    Args:
        gpu: vLLM's memory.
        host: the host tier's memory.
        load: the stream of loads.
        store: the stream of stores.
        places: by group of layers, the places of its layers in the order of computation; -1 for a
            state, which is copied with the first layer.
    """

    def __init__(
        self,
        gpu: Pool,
        host: Pool,
        load: CopyStream,
        store: CopyStream,
        places: Sequence[Sequence[int]],
    ) -> None:
        self._gpu, self._host, self._places = gpu, host, places
        self._layers = max(each[-1] for each in places) + 1
        self._load, self._store = load, store
        self._loads: list[_Copying] = []
        self._ahead: list[_Copying] = []
        self._loaded: list[torch.cuda.Event | None] = []  # after each layer of the step's loads
        self._held = 0  # layers whose loads vLLM's stream waits for
        self._saved = 0  # layers whose stores have begun
        self._loading: list[MoveReport] = []  # reports of this step
        self._storing: list[MoveReport] = []
        self._reports = DeviceReports()
        self._bad: set[int] = set()

    def begin(self, lost: list[int]) -> None:
        """Begin a step; what an aborted step has left is reported as failed.

        Args:
            lost: slots of vLLM's memory that were promised and will not be filled.
        """
        self._hold(len(self._loaded))  # the aborted step's loads must not overtake this step
        for copying, reports in ((self._loads, self._loading), (self._ahead, self._storing)):
            for one in copying:
                ids = one.ids[one.copies.blocks].tolist()
                if ids and one.copies.done < one.copies.layers:
                    reports.append(MoveReport(tuple(ids), error=_ABORTED))
        self._settle()
        self._loads, self._ahead, self._loaded, self._held, self._saved = [], [], [], 0, 0
        self._bad = set(lost)

    def lose(self, slot: int) -> None:
        """Report a slot of vLLM's memory as not filled: its load is not made."""
        self._bad.add(slot)

    def store(self, moves: Moves) -> None:
        """Store blocks that earlier steps have written."""
        if not len(moves):
            return
        self._store.follow()
        with self._store.copying():
            self._advance([*self._copies(moves, self._gpu, self._host)], self._layers)

    def store_ahead(self, moves: Moves) -> None:
        """Store blocks that this step fills, each layer after its computation."""
        if len(moves):
            self._ahead += self._copies(moves, self._gpu, self._host)

    def load(self, moves: Moves) -> None:
        """Load blocks that this step reads, from `start_loads` on."""
        if len(moves):
            self._loads += self._copies(moves, self._host, self._gpu)

    def await_stores(self) -> None:
        """Let the step write only after all stores so far have been read."""
        self._store.hold(self._store.record())

    def start_loads(self) -> None:
        """Begin the loads of the first layers."""
        for layer in range(_LOOK_AHEAD if self._load.overlaps else 0):
            self._issue(layer + 1)

    def wait_for_layer(self, layer: int) -> None:
        """Let vLLM's stream wait for a layer's loads, and begin those of a later one."""
        if layer >= self._held:
            self._issue(layer + 1)
            if self._load.overlaps:
                self._issue(layer + 1 + _LOOK_AHEAD)
            self._hold(layer + 1)

    def save_layer(self, layer: int | None) -> None:
        """Store a layer that the step has just written, of the blocks that it fills."""
        if layer is not None and self._ahead and self._saved == layer:
            self._save(layer + 1)

    def finish_loads(self) -> None:
        """Begin all loads of the step, and let vLLM's stream wait for them."""
        self._issue(self._layers)
        self._hold(self._layers)

    def finish(self) -> None:
        """End the step: copy the layers that its loads and stores have left."""
        self.finish_loads()
        self._save(self._layers)
        self._loads, self._ahead, self._loaded, self._held, self._saved = [], [], [], 0, 0

    def bad_slots(self) -> set[int]:
        """Slots of vLLM's memory that should have been filled by now and were not."""
        bad, self._bad = self._bad, set()
        return bad

    def reports(self, *, wait: bool) -> list[MoveReport]:
        """Return the reports of moves whose copies have been made.

        Args:
            wait: until all have.
        """
        self._settle()
        return self._reports.take(wait=wait)

    def drain(self) -> None:
        """Block until all copies are made."""
        self._load.synchronize()
        self._store.synchronize()

    def _save(self, upto: int) -> None:
        self._saved = upto
        if all(one.copies.done >= one.wide(upto) for one in self._ahead):
            return
        self._store.follow()
        with self._store.copying():
            self._advance(self._ahead, upto)

    def _issue(self, upto: int) -> None:
        """Enqueue the loads of the layers below `upto` together, and an event."""
        upto = min(upto, self._layers)
        if not self._loads or upto <= len(self._loaded):
            return
        if not self._loaded:
            self._load.follow()
        with self._load.copying():
            self._advance(self._loads, upto)
        self._loaded += [self._load.record()] * (upto - len(self._loaded))

    def _hold(self, upto: int) -> None:
        """Let vLLM's stream wait for the loads of the layers below `upto`."""
        if self._loads and upto > self._held:
            self._load.hold(self._loaded[upto - 1])
            self._held = upto

    def _settle(self) -> None:
        """Have reports wait for the stream that makes their copies."""
        if self._loading:
            self._reports.add(self._loading, self._load.record())
            self._loading = []
        if self._storing:
            self._reports.add(self._storing, self._store.record())
            self._storing = []

    def _copies(self, moves: Moves, source: Pool, target: Pool) -> Iterable[_Copying]:
        """The copies of moves, for each group of layers."""
        groups: list[int] = np.unique(moves.group).tolist() if len(source.groups) > 1 else [0]
        for number in groups:
            rows: NDArray[np.bool_] = moves.group == number
            part = moves if len(groups) == 1 else moves[rows]
            slots = np.stack((part.src_slot, part.dst_slot), axis=1)
            here, there = source.groups[number], target.groups[number]
            copies = LayerCopies.of_slots(here, there, slots, (0, here.layers))
            yield _Copying(part.id, part.dst_slot, copies, self._places[number])

    def _advance(self, copying: list[_Copying], upto: int) -> None:
        """Copy the layers before `upto`; note the moves that have failed or are complete."""
        for one in copying:
            copies, wide = one.copies, one.wide(upto)
            into = copies.target in self._gpu.groups
            reports = self._loading if into else self._storing
            if copies.done >= wide:
                continue
            for at, why in copies.advance(wide).items():
                reports.append(MoveReport((int(one.ids[at]),), error=why))
                if into:
                    self._bad.add(int(one.slots[at]))
            if wide == copies.layers and len(copies.blocks):
                reports.append(MoveReport(tuple(one.ids[copies.blocks].tolist())))
