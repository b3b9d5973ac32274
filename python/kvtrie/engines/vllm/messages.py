"""Messages between the scheduler's connector and the workers' connectors, once per step.

Invariant: they have only plain values and bytes, readable in any process of a server.
Cost: a few hundred bytes per step, per move and per block with an age to write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    from kvtrie.engines.vllm.page_slots import Pages
    from kvtrie.tiers.remote.form import ValueNames

    Expected: TypeAlias = tuple[int, dict[int, bytes], list[int], str]
    """The number of an adapter, its digest by rank, slots of vLLM's memory, and the request."""
    Place: TypeAlias = tuple[int, int]
    """A group of layers, and one of its slots in host memory."""
    IndexRow: TypeAlias = tuple[bytes, int, int, int, *tuple[int, ...]]
    """A row of an `Index`: label, slot, layers, and the group after the first."""

__all__ = ["Opened", "StepNews", "StepOrders"]


@dataclass(slots=True)
class StepOrders:
    """Orders from the scheduler to each worker for a step.

    Attributes:
        step: the step's number.
        moves: moves in the format of `Moves.to_bytes`, in the manager's order.
        ahead: stores of blocks filled by the step, in the same format.
        lost: promised slots of vLLM's memory, not to be filled.
        forget: whether to forget all blocks on lower tiers.
        computes: whether the step computes anything.
        used: blocks on disk with ages to write down, as `Opened.rows`.
        weights: the number of questions for the digest of the weights. A worker answers each new
            number.
        taken_back: whether stores may still read blocks taken back by vLLM.
        verify: places and keys of blocks of an earlier server in host memory to verify.
        used_host: blocks in kept host memory with ages to write down, as `used`.
        adapters: the number of questions for the held adapters.
        load_adapters: vLLM's requests for adapters to load before the answer.
        expected: the expected adapters of loaded blocks.
        receive: by waiting request, its loads.
        unreceived: requests with promised blocks that will not be loaded.
        pages: the blocks of each slot in moves, by group of layers with several vLLM blocks per
            slot.
    """

    step: int
    moves: list[bytes] = field(default_factory=list[bytes])
    ahead: list[bytes] = field(default_factory=list[bytes])
    lost: list[int] = field(default_factory=list[int])
    forget: bool = False
    computes: bool = True
    used: list[IndexRow] = field(default_factory=list["IndexRow"])
    weights: int = 0
    taken_back: bool = False
    verify: list[tuple[Place, bytes]] = field(default_factory=list[tuple["Place", bytes]])
    used_host: list[IndexRow] = field(default_factory=list["IndexRow"])
    adapters: int = 0
    load_adapters: list[Any] = field(default_factory=list[Any])
    expected: list[Expected] = field(default_factory=list["Expected"])
    receive: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    unreceived: set[str] = field(default_factory=set[str])
    pages: dict[int, dict[int, Pages]] = field(default_factory=dict[int, dict[int, "Pages"]])


@dataclass(slots=True)
class StepNews:
    """Reports from a worker after a step.

    Attributes:
        step: the step's number.
        reports: reports in the format of `MoveReport.to_bytes`, empty without any.
        weights: the number of the question and the digest, if the step asked for it.
        adapters: the number of the last question and the digests of the held adapters, by vLLM's
            number, if either has changed.
        verified: by place in host memory, whether the block of an earlier server is valid.
        kept: blocks for the next server in this worker's host memory. None without `keep`, and for
            ranks sharing the memory of a lower rank.
        lost: missing blocks of earlier servers in this memory, by reason.
        unstored: blocks that the shared store has failed to store or return since the last report,
            by reason.
    """

    step: int
    reports: bytes
    weights: tuple[int, bytes] | None = None
    verified: dict[Place, bool] = field(default_factory=dict["Place", bool])
    kept: int | None = None
    lost: dict[str, int] = field(default_factory=dict[str, int])
    unstored: dict[str, int] = field(default_factory=dict[str, int])
    adapters: tuple[int, dict[int, bytes]] | None = None


@dataclass(slots=True)
class Opened:
    """A worker's tiers, sent once at start.

    Attributes:
        rooms: blocks of each tier below vLLM's memory, or with several groups bytes.
        layers: the worker's layers of each group.
        rows: the whole blocks found again on its disk, or None without a disk.
        weights: the digest of its loaded weights.
        others: blocks of a different model in the folder of its disk.
        pinned: whether its host memory is locked.
        kept_rows: as `rows`, of its host memory. None without `keep`, and for ranks sharing the
            memory of a lower rank.
        names: the fields in the names of the rank's values in a shared store, by group of layers,
            or None without a store.
    """

    rooms: list[int]
    layers: list[int]
    rows: list[IndexRow] | None = None
    weights: bytes = b""
    others: int = 0
    pinned: bool = False
    kept_rows: list[IndexRow] | None = None
    names: tuple[ValueNames, ...] | None = None
