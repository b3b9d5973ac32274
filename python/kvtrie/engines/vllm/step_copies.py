"""StepCopies: the copies of a step between vLLM's memory and host memory, on three streams.

Loads run on a load stream, up to two layers ahead of the computing layer. Stores run on a store
stream, each layer after its computation. Events order them with vLLM's own stream:

- loads and stores wait for all earlier work on vLLM's stream
- before a layer reads, vLLM's stream waits only for the event of this layer's load
- before a step with `taken_back` in its orders, vLLM's stream waits for the stores in flight,
  because the step may overwrite their blocks

Without a GPU the calling thread makes the copies in the same order, each layer's loads just before
it reads, and nothing waits.
Invariant: every move is reported once, after its copy on the stream. A slot with a failed load is
reported to vLLM in the same step. Cost: a call and two events per copied layer.
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

_LOOK_AHEAD = 2  # layers, as in `Layerwise`
_ABORTED = "the step was aborted before it was copied"


@dataclass(slots=True)
class _Copying:
    """Moves of a group of layers and their copies.

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
        """Return the number of the group's layers before the layer `upto` of the model."""
        return bisect_left(self.places, upto)


class StepCopies:
    """Copies of steps, step after step.

    Args:
        gpu: vLLM's memory.
        host: the host tier's memory.
        load: the stream of loads.
        store: the stream of stores.
        places: by group of layers, the places of its layers in the order of computation. A state
            has -1 and is copied with the first layer.
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
        self._held = 0  # layers with loads awaited by vLLM's stream
        self._saved = 0  # layers with issued stores
        self._loading: list[MoveReport] = []  # reports of this step
        self._storing: list[MoveReport] = []
        self._reports = DeviceReports()
        self._bad: set[int] = set()

    def begin(self, lost: list[int]) -> None:
        """Begin a step, and report unfinished copies of an aborted step as failed.

        Args:
            lost: promised slots of vLLM's memory, not to be filled.
        """
        self._hold(len(self._loaded))  # the aborted step's loads must not overtake this step
        for copying, reports in ((self._loads, self._loading), (self._ahead, self._storing)):
            for one in copying:
                ids = one.ids[one.copies.blocks].tolist()
                if ids and one.copies.done < one.copies.layers:
                    reports.append(MoveReport(tuple(ids), error=_ABORTED))
        self._assign_events()
        self._loads, self._ahead, self._loaded, self._held, self._saved = [], [], [], 0, 0
        self._bad = set(lost)

    def fail(self, slot: int) -> None:
        """Report a slot of vLLM's memory as not filled, without a load."""
        self._bad.add(slot)

    def store(self, moves: Moves) -> None:
        """Store blocks written by earlier steps."""
        if not len(moves):
            return
        self._store.follow()
        with self._store.copying():
            self._advance([*self._copies(moves, self._gpu, self._host)], self._layers)

    def store_ahead(self, moves: Moves) -> None:
        """Store blocks filled by this step, each layer after its computation."""
        if len(moves):
            self._ahead += self._copies(moves, self._gpu, self._host)

    def load(self, moves: Moves) -> None:
        """Load blocks read by this step, from `start_loads` on."""
        if len(moves):
            self._loads += self._copies(moves, self._host, self._gpu)

    def await_stores(self) -> None:
        """Make vLLM's stream wait for all stores so far before the step writes."""
        self._store.hold(self._store.record())

    def start_loads(self) -> None:
        """Issue the loads of the first layers."""
        for layer in range(_LOOK_AHEAD if self._load.overlaps else 0):
            self._issue(layer + 1)

    def wait_for_layer(self, layer: int) -> None:
        """Make vLLM's stream wait for a layer's loads, and issue a later layer's loads."""
        if layer >= self._held:
            self._issue(layer + 1)
            if self._load.overlaps:
                self._issue(layer + 1 + _LOOK_AHEAD)
            self._hold(layer + 1)

    def save_layer(self, layer: int | None) -> None:
        """Store a newly written layer of the blocks filled by the step."""
        if layer is not None and self._ahead and self._saved == layer:
            self._save(layer + 1)

    def finish_loads(self) -> None:
        """Issue all loads of the step, and make vLLM's stream wait for them."""
        self._issue(self._layers)
        self._hold(self._layers)

    def finish(self) -> None:
        """End the step: copy the remaining layers of its loads and stores."""
        self.finish_loads()
        self._save(self._layers)
        self._loads, self._ahead, self._loaded, self._held, self._saved = [], [], [], 0, 0

    def bad_slots(self) -> set[int]:
        """Return the slots of vLLM's memory with failed loads since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def reports(self, *, wait: bool) -> list[MoveReport]:
        """Return the reports of moves with finished copies.

        Args:
            wait: wait for all copies.
        """
        self._assign_events()
        return self._reports.take(wait=wait)

    def drain(self) -> None:
        """Block until all copies are done."""
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
        """Enqueue the loads of the layers below `upto` with a single event."""
        upto = min(upto, self._layers)
        if not self._loads or upto <= len(self._loaded):
            return
        if not self._loaded:
            self._load.follow()
        with self._load.copying():
            self._advance(self._loads, upto)
        self._loaded += [self._load.record()] * (upto - len(self._loaded))

    def _hold(self, upto: int) -> None:
        """Make vLLM's stream wait for the loads of the layers below `upto`."""
        if self._loads and upto > self._held:
            self._load.hold(self._loaded[upto - 1])
            self._held = upto

    def _assign_events(self) -> None:
        """Hold reports back until the stream of their copies has reached this point."""
        if self._loading:
            self._reports.add(self._loading, self._load.record())
            self._loading = []
        if self._storing:
            self._reports.add(self._storing, self._store.record())
            self._storing = []

    def _copies(self, moves: Moves, source: Pool, target: Pool) -> Iterable[_Copying]:
        """Yield the copies of moves, for each group of layers."""
        groups: list[int] = np.unique(moves.group).tolist() if len(source.groups) > 1 else [0]
        for number in groups:
            rows: NDArray[np.bool_] = moves.group == number
            part = moves if len(groups) == 1 else moves[rows]
            slots = np.stack((part.src_slot, part.dst_slot), axis=1)
            source_pool, target_pool = source.groups[number], target.groups[number]
            copies = LayerCopies.of_slots(source_pool, target_pool, slots, (0, source_pool.layers))
            yield _Copying(part.id, part.dst_slot, copies, self._places[number])

    def _advance(self, copying: list[_Copying], upto: int) -> None:
        """Copy the layers before `upto`, and report failed and complete moves."""
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
