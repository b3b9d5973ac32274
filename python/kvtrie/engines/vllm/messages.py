"""Messages between the scheduler's connector and the workers' connectors, once per step.

Invariant: they hold plain values and bytes only, so that any process of a server can read them.
Cost: a few hundred bytes per step, per move and per block whose age is written down.
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
    """From the scheduler: what each worker does in a step.

    Attributes:
        step: the step's number.
        moves: moves as `Moves.to_bytes` gave them, in the manager's order.
        ahead: stores of blocks that the step fills, in the same form.
        lost: slots of vLLM's memory that were promised and will not be filled.
        forget: whether all that lower tiers hold is to be forgotten.
        computes: whether the step computes anything.
        used: blocks on disk whose ages are to be written down, as `Opened.rows`.
        weights: the number of times that the digest of the weights was asked for; one that the
            worker has not seen asks it to answer.
        taken_back: whether vLLM has taken blocks back that stores may still read.
        prove: places and keys of blocks of an earlier server in host memory, to be proved.
        used_host: blocks in kept host memory whose ages are to be written down, as `used`.
        adapters: the number of times that the held adapters were asked for.
        load_adapters: vLLM's requests for adapters that workers load before they answer.
        expected: for blocks that the step loads, the adapter that they are of.
        receive: by request that waits for its loads, these moves.
        unreceived: requests whose promised blocks will not be loaded.
        pages: by group of layers whose slots are several of vLLM's blocks, the blocks of each slot
            that moves read or write.
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
    prove: list[tuple[Place, bytes]] = field(default_factory=list[tuple["Place", bytes]])
    used_host: list[IndexRow] = field(default_factory=list["IndexRow"])
    adapters: int = 0
    load_adapters: list[Any] = field(default_factory=list[Any])
    expected: list[Expected] = field(default_factory=list["Expected"])
    receive: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    unreceived: set[str] = field(default_factory=set[str])
    pages: dict[int, dict[int, Pages]] = field(default_factory=dict[int, dict[int, "Pages"]])


@dataclass(slots=True)
class StepNews:
    """From a worker: the step that it has carried out, and how moves fared.

    Attributes:
        step: the step's number.
        reports: reports as `MoveReport.to_bytes` gave them; empty if there are none.
        weights: the number of the question and the digest, if the step asked for it.
        adapters: the number of the last question and the digests of the held adapters, by vLLM's
            number, if either has changed.
        proved: by place in host memory, whether the block of an earlier server was proved.
        kept: blocks that the next server would find in this worker's host memory; None without
            `keep`, and for ranks that share the memory of another one.
        lost: blocks of earlier servers that were misses there, by reason.
        unstored: blocks that the shared store did not take or return since the last news, by
            reason.
    """

    step: int
    reports: bytes
    weights: tuple[int, bytes] | None = None
    proved: dict[Place, bool] = field(default_factory=dict["Place", bool])
    kept: int | None = None
    lost: dict[str, int] = field(default_factory=dict[str, int])
    unstored: dict[str, int] = field(default_factory=dict[str, int])
    adapters: tuple[int, dict[int, bytes]] | None = None


@dataclass(slots=True)
class Opened:
    """From a worker, once at start: what its tiers are.

    Attributes:
        rooms: blocks of each tier below vLLM's memory, or with several groups bytes.
        layers: layers of each group that the worker has.
        rows: the whole blocks that its disk found again; None without a disk.
        weights: the digest of the weights that it has loaded.
        others: blocks of another model in the folder of its disk.
        pinned: whether its host memory is locked.
        kept_rows: as `rows`, of its host memory; None without `keep`, and for ranks that share the
            memory of another one.
        names: the fields that form names of the rank's values in a shared store, by group of
            layers; None without a store.
    """

    rooms: list[int]
    layers: list[int]
    rows: list[IndexRow] | None = None
    weights: bytes = b""
    others: int = 0
    pinned: bool = False
    kept_rows: list[IndexRow] | None = None
    names: tuple[ValueNames, ...] | None = None
