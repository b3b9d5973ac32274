# ruff: noqa: PYI021 - native classes have no source that could carry these docstrings
"""Native classes of kvtrie; import them from `kvtrie`.

Times are integer nanoseconds on the caller's monotone clock, below 2**63. A time below the latest
time seen counts as the latest time (`Stats.clamped`). So does a time more than a day above it,
until the next call confirms it (`Stats.doubted`). A tier is named by its kind, or by its index in
the manager's list. A block is named by its handle, a `uint64` valid until the block is removed, or
by a `MatchedBlock`.

In addition to the errors it lists, every call can raise `ConfigError` for a wrong argument (the
message has the numbers), `ClosedError` once the manager is closed, and `InvariantError` once it is
broken. A call that raises has changed nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    SupportsIndex,
    TypeAlias,
    final,
    overload,
    type_check_only,
)

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvtrie.model.cost import Cost
from kvtrie.model.shape import ModelShape
from kvtrie.settings.hint import Hint
from kvtrie.settings.resume import ResumePoints
from kvtrie.settings.scope import Scope
from kvtrie.settings.tier import Lane, Tier

__all__ = [
    "COMMIT",
    "KERNELS",
    "BlockManager",
    "Committed",
    "Copy",
    "DiskStore",
    "Event",
    "EventBatches",
    "Eviction",
    "Explanation",
    "Failed",
    "GroupStats",
    "HashLines",
    "HintReply",
    "Histogram",
    "Index",
    "KeptFile",
    "LaneStats",
    "Lease",
    "Match",
    "MatchedBlock",
    "Miss",
    "MissBranch",
    "Move",
    "Moves",
    "Plan",
    "Simulation",
    "Span",
    "Stats",
    "TierStats",
    "Transmission",
    "Unpriced",
    "ValueFolder",
    "ValueFormat",
    "__version__",
    "locality",
    "page_bytes",
]

COMMIT: str  # 12 hex digits, and `+` after uncommitted changes; or "unknown"
KERNELS: dict[str, str]
__version__: str

def page_bytes(slots: list[int]) -> int:
    """Return the bytes of a page of a tier shared by several groups of layers.

    Args:
        slots: bytes of a slot of each group.

    Raises:
        ConfigError: a slot without bytes, or above 2^56 bytes.
    """

@final
class HashLines:
    """Fast reader of the usual lines of a trace of block hashes.

    Equal hashes have equal ids, and distinct hashes have distinct ids.

    Args:
        most: maximum number of ids in a line.
        own: hashes below this number are used as ids. Larger hashes are numbered from it in order
            of appearance.
        room: upper end of the ids, excluded.
        hash_tokens: tokens of a hash, to check lines against. None disables the check.
    """

    def __new__(cls, *, most: int, own: int, room: int, hash_tokens: int | None = None) -> Self: ...
    def row(
        self, line: str
    ) -> (
        tuple[
            int | str | None,
            int | None,
            int,
            int,
            NDArray[np.uint32],
            str | None,
            list[str] | None,
            tuple[str | None, list[str] | None, int | None] | None,
        ]
        | None
    ):
        """Return the fields of a line.

        Args:
            line: a JSON object.

        Returns:
            `(timestamp, arrival_ns, input tokens, output tokens, block ids, session, names of
            unread fields, (request_id, wait_for, tool_wait_ms))`. None for an invalid or unusual
            line: `kvtrie.sim.readers.hashes` then reads the line or names the fault.
        """

    def ids(self, hashes: Sequence[int]) -> NDArray[np.uint32]:
        """Return the ids of 64-bit hashes.

        Raises:
            ConfigError: no id is left.
        """

def locality(candidates: list[tuple[int, int]], ratio: int) -> int:
    """Return the machine chosen by the simulator's router `locality`.

    Args:
        candidates: `(load, hit)` of each machine, in requests and tokens; at least one machine.
        ratio: in units of 2**-32, at least 1.
    """

@type_check_only
class _Array(Protocol):
    """An object readable by numpy as an array, for example a CPU tensor."""

    def __array__(self) -> NDArray[Any]: ...

# 0 <= token < 2**32, at most 2**28 of them; contiguous uint32 arrays are read in place.
_Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | Buffer | _Array
_Ids: TypeAlias = SupportsIndex | Iterable[SupportsIndex] | NDArray[np.integer[Any]]
_Load: TypeAlias = Literal["plan", "all", "none"]
_Kind: TypeAlias = Literal["gpu", "host", "disk", "remote"]
_Tier: TypeAlias = int | _Kind
_Block: TypeAlias = int | MatchedBlock
_Cause: TypeAlias = Literal["demand", "ahead", "suspended", "failed", "cleared", "reset", "hinted"]
_Reason: TypeAlias = Literal["clean", "demoted", "dropped"]

@final
class BlockManager:
    """Decides which blocks to cache on which tier, to evict, to move and to recompute.

    The manager never touches bytes: `moves` returns the copies to make, `complete` reports them
    done. All methods may be called from any thread. Long calls (`lookup_many` and `acquire` of more
    than 65 536 tokens, `hint`, `index`, `load_index`, `flush`, `snapshot`, `audit`) let other
    threads run.
    """

    def __new__(
        cls,
        model: ModelShape,
        tiers: Iterable[Tier],
        *,
        block_tokens: int = 16,
        policy: str = "learned",
        cost: Cost | Literal["default", "seed", "python"] = "default",
        structure: Literal["leaf-only", "holes"] = "leaf-only",
        drop_order: Literal["shallow", "seed"] = "shallow",
        token_weight: int = 1,
        machine: int = 0,
        ranks: int = 1,
        events: int = 0,
        events_of: Literal["evictions", "residency"] = "evictions",
        eviction_log: int = 0,
        reuse: bool = True,
        epsilon: float = 0.015625,
        objective: Literal["cost", "balanced", "hits"] = "cost",
        resume: ResumePoints | None = None,
        explain: bool = False,
        secret: bytes | None = None,
    ) -> Self:
        """Make a manager without a block.

        Args:
            model: the shape of the model.
            tiers: one to four tiers, fastest first: gpu, host, disk, remote, each at most once.
            block_tokens: tokens of a block.
            policy: eviction policy, from `policies()`. A tier may have its own. The default learns
                how soon each kind of block is used again.
            cost: cost of recomputing a token, relative to a token without context. With "python"
                `set_costs` gives it per block. Until then the default applies.
            structure: "leaf-only" keeps every cached prefix whole; "holes" lets any block leave,
                and the engine recomputes it. A scope may have its own structure.
            drop_order: for operators: the layers of a last copy to evict first: the first layers
                with "shallow", the last layers with "seed".
            token_weight: real tokens per given token. Above 1 for traces of block hashes.
            machine: for operators: this machine's number, a label of metrics.
            ranks: tensor-parallel ranks, 1 to 64. A move is done when all ranks have reported it.
            events: maximum number of events kept for `take_events`.
            events_of: "evictions", with reason and cause, or "residency": all layers that arrive on
                a tier or leave it, with content keys, for a directory of several machines.
                Residency events cost a hash per block.
            eviction_log: maximum number of evictions kept for `evictions`, up to 1 048 576. Each
                takes about 200 bytes and about a microsecond. 0 keeps none.
            reuse: for operators: whether `retention` and similar policies multiply the cost by the
                number of uses. The uses of removed blocks are remembered, in 8 bytes per block of
                the tiers.
            epsilon: for operators: policies of the form cost / idle round costs down to classes
                `1 + epsilon` apart, 0 to 1. The value of a victim is at most this factor above the
                smallest value, by default 1/64. With 0 victims are exact.
            objective: what policies with values save: the "cost" of recomputing blocks, or "hits",
                with equal blocks and unused prices. Every tier then needs a policy with values:
                `learned`, `retention`, `flat`, `weighted`.
            resume: resumable borders in a model of several groups of layers. On gpu, host and disk
                each group then keeps only the blocks needed by resume points and leases. None keeps
                all tokens of all layers, as does a single group of full attention.
            explain: whether to remember evicted blocks for `explain_miss` under a policy without
                such a memory, in 8 bytes per block of the tiers. Evictions do not depend on it.
            secret: keys the hashes of the tenants of each block. Scopes with `share_after` need a
                secret if a tier outlives the manager.

        Raises:
            ConfigError: contradictory settings, or a disk with a path or a remote tier for a model
                without a fingerprint.
        """

    @property
    def model(self) -> ModelShape:
        """The shape of the model."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def machine(self) -> int:
        """This machine's number."""

    @property
    def generation(self) -> int:
        """Counter that increments whenever the result of a lookup may have changed.

        While it is unchanged, a lookup of the same tokens in the same scope returns the same blocks
        and copies, except for predicted times. A scheduler need not repeat it for a waiting
        request. Increments whenever a block is added, removed or changes its residency. May also
        increment spuriously. Costs O(1).

        Raises:
            ClosedError: the manager is closed.
        """

    @staticmethod
    def policies() -> list[str]:
        """The names of all policies."""

    def lookup(
        self, tokens: _Tokens, *, now: int, scope: Scope | None = None, keep: int = 1
    ) -> Match:
        """Return the longest usable prefix of a sequence; pins and refreshes nothing.

        Every block of the prefix is resident or arriving on some tier or, in a scope with holes,
        recomputable.

        Args:
            tokens: the sequence.
            now: the time.
            scope: the scope of its blocks.
            keep: minimum number of uncovered tokens at the end.

        Raises:
            ConfigError: the scope was first used with another structure.
        """

    def lookup_many(
        self,
        tokens: Iterable[_Tokens],
        *,
        now: int,
        scope: Scope | None = None,
        keep: int = 1,
    ) -> list[Match]:
        """Look up many sequences in one call, against the same state.

        A single conversion and lock. Other threads run during a call with more than 65 536 tokens.

        Args:
            tokens: the sequences.
            now: the time.
            scope: the scope of their blocks.
            keep: minimum number of uncovered tokens at the end of each sequence.

        Returns:
            A match per sequence, in their order.

        Raises:
            ConfigError: a token is out of range, or the scope was first used with another
                structure.
        """

    def keys(self, tokens: _Tokens, *, scope: Scope | None = None) -> NDArray[np.uint8]:
        """Return the content keys of the full blocks of a sequence, cached or not.

        A key is a hash of the model's fingerprint, the scope and all tokens and digests up to the
        end of the block. Equal in every process with the same fingerprint and block size.

        Args:
            tokens: the sequence.
            scope: the scope of its blocks.

        Returns:
            `(blocks, 32)`, without the tokens after the last full block.

        Raises:
            ConfigError: the model has no fingerprint.
        """

    def parts_above(
        self, tokens: _Tokens, tier: _Tier, *, scope: Scope | None = None
    ) -> list[list[bool]]:
        """Return the full blocks of a sequence held above a tier, per group of layers.

        Args:
            tokens: the sequence.
            tier: the tier below the tiers to search, for example a store asked for the rest.
            scope: the scope of its blocks.

        Returns:
            For each group and each block known to the manager, whether a tier above has the block
            or expects it. No tier above has any block after them.
        """

    def longest_resume(self, parts: list[list[bool]], most: int) -> int:
        """Return the longest border at which every group after the first can resume.

        Args:
            parts: for each group after the first, whether it has each block.
            most: the last allowed border, in blocks, all held by the first group.

        Raises:
            ConfigError: a wrong number of groups, or fewer blocks than `most`.
        """

    def resume_needs(self, border: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return the blocks needed from each group after the first to resume at a border.

        Args:
            border: number of blocks before the border.

        Returns:
            For each group two ranges, each its first block and the last plus 1: blocks of the
            sinks, and blocks up to the border.
        """

    def acquire(
        self,
        tokens: _Tokens,
        *,
        now: int,
        scope: Scope | None = None,
        session: str | None = None,
        session_blocks: int | None = None,
        keep: int = 1,
        reserve: int = 0,
        load: _Load = "plan",
        deadline: int | None = None,
        layerwise: bool = False,
    ) -> Lease:
        """Look up a prompt, pin the blocks its plan reuses or loads, and allocate slots.

        A call that fails has pinned and allocated nothing.

        Args:
            tokens: the prompt.
            now: the time.
            scope: the scope of its blocks.
            session: the prompt's conversation. Its name counts within the scope.
            session_blocks: final number of blocks of the session, at least the present number, for
                policies that rank a block by its position in the session. None keeps the last
                value.
            keep: number of tokens at the end to compute in any case.
            reserve: number of tokens to allocate after the prompt's end, in addition to the
                prompt's unmatched tokens.
            load: "plan" loads or computes, whichever is ready sooner; "all" loads every loadable
                block, and in a leaf-only scope the match ends at the first block it cannot load;
                "none" loads nothing until `Lease.load`.
            deadline: latest time at which a planned load may be ready.
            layerwise: whether the engine computes a layer while it loads the next layers, as
                `LayerwiseEngine` does. Otherwise it waits for all layers. Plans depend on it,
                including plans of `Lease.resume`.

        Raises:
            NoSpaceError: a tier lacks room for it.
            ConfigError: an empty prompt, or the scope was first used with another structure.
        """

    def lease(self, lease_id: int) -> Lease:
        """Return a held lease by its id.

        Raises:
            ClosedError: the lease is released, or never existed.
        """

    def moves(self, limit: int | None = None, *, shared: int | None = None) -> Moves:
        """Take moves to carry out, each exactly once, in topological order.

        A move may start on a rank once the move in its `after` column has succeeded on all ranks.
        If the first move failed, the dependent move has failed with it: do not carry it out.

        A store to tier `remote` begins when it is taken: its source is then kept until the store
        has ended. Until it is taken, eviction may take the source like any copy, and drops the
        store, so no request waits for a shared store. Take only as many stores as workers can
        begin.

        Args:
            limit: maximum number. None takes all.
            shared: maximum number of blocks to begin storing to tier `remote`, oldest first. None
                begins all.
        """

    @property
    def shared_stores(self) -> tuple[int, int]:
        """Blocks waiting for a store to tier `remote`, and stores dropped so far.

        A store is dropped when its block leaves the tier above before `moves` has returned it.

        Raises:
            ClosedError: the manager is closed.
        """

    def complete(
        self,
        ids: _Ids,
        *,
        now: int,
        ok: bool = True,
        layers_done: int | None = None,
        rank: int = 0,
        error: str | None = None,
        hung: bool = False,
        cancelled: bool = False,
    ) -> int:
        """Report moves as done, failed or partly done. The manager updates their copies.

        Repeating a report changes nothing.

        Args:
            ids: the moves.
            now: the time.
            ok: whether the moves succeeded. If not, unreadable sources are avoided, waiting leases
                are planned again, and `failed` names the tokens.
            layers_done: number of arrived layers of each move, counted from its first. None means
                all.
            rank: the tensor-parallel rank that reports.
            error: reason of the failure.
            hung: the moves failed but still run. Their slots stay out of use until a second report
                with `ok=False, hung=False`.
            cancelled: the moves failed before they started: neither source nor destination is
                faulty.

        Returns:
            Number of moves completed by this report, on all ranks.

        Raises:
            ConfigError: a move never returned by `moves`, or a report in contradiction to an
                earlier report.
        """

    def failed(self) -> list[Failed]:
        """Return and clear the list of tokens that failed to arrive where a plan placed them.

        Read the plan, `matched` and `slots` of every listed lease again. The latest 4096 rows are
        kept; `Stats.failed_lost` counts the overwritten rows. A lease's own `plan` is always
        current, whether its rows are read or not.
        """

    def predict(self, ids: _Ids, *, now: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Predict the times at which the first and the last layer of moves arrive.

        Args:
            ids: the moves.
            now: the time.

        Returns:
            Two arrays of nanoseconds, `uint64[n]`; `now` for an ended move.

        Raises:
            ConfigError: a move never returned by `moves`.
        """

    def transmit(
        self, lane: str, tokens: int, *, now: int, layers: int | None = None
    ) -> Transmission:
        """Add a transmission to a lane's queue, without a move; for simulators.

        Args:
            lane: the lane's name.
            tokens: number of tokens of KV to send.
            now: the time. The transmission starts after everything in the lane's queue.
            layers: number of layers to send. None means all.

        Returns:
            Its predicted times: `latency_ns + bytes / bytes_per_s` after the queue.

        Raises:
            ConfigError: an unknown lane, or more layers than the model has.
        """

    def add_lane_busy(self, lane: str, *, busy_ns: int) -> None:
        """Add the time in which a lane was busy to `LaneStats.busy_ns`.

        For engines with their own copies. An `Executor` reports it itself.

        Args:
            lane: its name.
            busy_ns: nanoseconds.

        Raises:
            ConfigError: an unknown lane.
        """

    def mark(
        self,
        tokens: _Tokens,
        tier: _Tier,
        *,
        present: bool,
        now: int,
        ready: int | None = None,
        first: int | None = None,
        per_layer: int | None = None,
        scope: Scope | None = None,
        skip: int = 0,
        group: int | None = None,
    ) -> NDArray[np.uint64]:
        """Set or clear the residency of a sequence's full blocks on a tier, without a move.

        An earlier move may still read a newly assigned slot. Write to the slot's memory after the
        move has ended.

        Of `ready`, `first` and `per_layer`, two give the third by
        `first + (layers - 1) * per_layer == ready`.

        Args:
            tokens: the sequence.
            tier: the tier.
            present: whether the blocks are there. Setting makes room, adds missing layers, and
                repairs an unreadable copy.
            now: the time.
            ready: when all layers are there. None means now. Until then the copy is arriving.
            first: when the first layer is there.
            per_layer: nanoseconds between two layers.
            scope: the scope of the blocks.
            skip: number of blocks to leave unchanged at the front. Setting needs them cached.
            group: the only group of layers to mark, if groups are kept apart. None marks all
                groups; of groups after the first only the blocks needed to resume at the end of the
                sequence.

        Returns:
            Handles of the blocks that are or were there, `uint64[n]`.

        Raises:
            NoSpaceError: the tier lacks room for the blocks.
            ConfigError: contradictory times. Clearing a leased or moving block, or a block needed
                by later blocks. Setting a block partly in flight, or still written by a failed
                move. A tier with slots owned by the engine.
        """

    def evict(
        self, count: int, tier: _Tier = 0, *, now: int, stay: _Ids = (), group: int = 0
    ) -> NDArray[np.uint64]:
        """Evict blocks in the order of the tier's policy, all or none.

        For an engine that stores the bytes and asks for victims. In a group of layers after the
        first, windows or states are evicted and their blocks stay: first windows and states without
        a resume point, then windows and states of the first points to leave. Leased and pinned
        blocks stay.

        Args:
            count: number of blocks.
            tier: the tier to free.
            now: the time.
            stay: handles of blocks to keep, in a leaf-only scope with all blocks before them.
                Handles of removed blocks are ignored. Empty with a group after the first.
            group: group of layers, if groups are kept apart.

        Returns:
            Handles of the evicted blocks, `uint64[n]`. In a leaf-only scope the eviction of a last
            copy also evicts the children on other tiers, so there may be more than `count` handles.
            In a group after the first there are at most `count`, and fewer if the rest is held.

        Raises:
            NoSpaceError: in the first group, fewer blocks are evictable.
            ConfigError: an unknown tier or group, or a tier with slots owned by the engine.
        """

    def pin_copies(self, blocks: _Ids, tier: _Tier, *, now: int, group: int = 0) -> int:
        """Keep copies on their tier while another machine reads them. Takes no slot above.

        Args:
            blocks: handles of blocks with all layers on the tier.
            tier: the tier.
            now: the time.
            group: group of layers, if groups are kept apart.

        Returns:
            The pin, for `unpin_copies`.

        Raises:
            ConfigError: a block without all layers on the tier, an unknown group, or a tier with
                slots owned by the engine.
        """

    def clear_copies(
        self, blocks: _Ids, tier: _Tier, *, group: int, now: int
    ) -> NDArray[np.uint64]:
        """Clear windows or states of blocks after the engine has discarded them.

        Resume points with a cleared window or state end. The blocks stay.

        Args:
            blocks: handles of the blocks.
            tier: the tier.
            group: a group of layers after the first.
            now: the time.

        Returns:
            Handles of the blocks that had a copy there, `uint64[n]`.

        Raises:
            ConfigError: a removed block, a copy held by a lease or a pin, an unknown tier or group,
                or a tier with slots owned by the engine.
        """

    def known(self, tokens: _Tokens, *, scope: Scope | None = None) -> int:
        """Return the number of leading tokens of a sequence known to the first group of layers.

        `lookup` covers fewer tokens if another group lacks a window or a state. Pins and refreshes
        nothing.

        Args:
            tokens: the sequence.
            scope: the scope of its blocks.

        Raises:
            ConfigError: invalid tokens.
        """

    def unpin_copies(self, pin: int, *, now: int) -> None:
        """End a pin. An ended or unknown pin is ignored.

        Args:
            pin: the result of `pin_copies`.
            now: the time.
        """

    def commit_many(
        self,
        lease_ids: _Ids,
        tokens: NDArray[np.integer[Any]] | Sequence[int] | Iterable[_Tokens],
        *,
        now: int,
    ) -> list[Committed]:
        """Call `Lease.commit` for many leases: for all or, on an error, for none.

        Args:
            lease_ids: the leases, each once.
            tokens: a token per lease in an array or list, or a sequence per lease.
            now: the time.
        """

    def index(
        self,
        tier: _Tier | None = None,
        *,
        now: int,
        blocks: _Ids | None = None,
    ) -> Index:
        """Return the index of the blocks on a tier, for `load_index` of a later manager.

        Args:
            tier: which tier. None is the last tier.
            now: the time. Ages are counted from it.
            blocks: handles of the blocks to list, in this order. None lists all, parents first.
                Blocks not on the tier are left out. Costs O(blocks listed).

        Raises:
            ConfigError: a tier with layer slots, or a model without a fingerprint.
        """

    def load_index(self, index: Index, tier: _Tier | None = None, *, now: int) -> int:
        """Restore the blocks of a tier from an index.

        Each row is verified by the chain of keys from its scope to its block. Unusable rows are
        left out: rows of another model, after a missing block, in a used slot, of a partial block,
        or with a part of a block in a scope without holes.

        Args:
            index: the result of `index`, possibly read back from a store.
            tier: which tier. None is the last tier.
            now: the time.

        Returns:
            Number of restored blocks.

        Raises:
            ConfigError: a tier with layer slots, a tier with slots owned by the engine, or a
                model without a fingerprint.
        """

    def flush(self, *, now: int) -> int:
        """Copy blocks without a copy on a lower tier to the next tier, before a shutdown.

        The youngest blocks go first, parents before their children, and no younger block is evicted
        for them, so a disk holds whole prefixes afterwards. Bytes move one tier at a time: carry
        out the moves and flush again, once per tier. `Executor.flush` does so.

        Args:
            now: the time.

        Returns:
            Number of moves begun.
        """

    def hint(self, hints: Iterable[Hint], *, now: int) -> list[HintReply]:
        """Apply hints about the future from an engine or an agent. See `kvtrie.settings.hint`.

        All hints are checked before the first is applied. Hints are soft: only a lease pins, and no
        request fails because of a hint. A call without hints ends expired hints.

        Args:
            hints: `Retain`, `Release`, `Prefetch`, `Demote`, `Quota`, `ResumeAt`, `Progress`.
            now: the time, from which times to live count.

        Returns:
            A reply per hint.

        Raises:
            ConfigError: an invalid hint. The message names it. No hint is applied then. An unknown
                lease or session is no error: its reply is "rejected".
        """

    def next_due(self) -> int | None:
        """Return the time at which waiting loads are due. None if no load waits.

        Call `hint` then, with or without hints. After `Prefetch` with a deadline and after
        `Progress`, loads wait for their latest start. Other calls may change the time.
        """

    def sort_versions(
        self,
        keep: Iterable[str],
        retire: Iterable[str] = (),
        others: Literal["keep", "retire", "drop"] = "keep",
        *,
        blocks: int,
        now: int,
        start: int | None = None,
    ) -> tuple[int | None, int, int]:
        """Visit some blocks, and keep, retire or drop each by the version of its scope.

        A version is the part of `Scope.lora` before its first space, for example a digest of
        weights. Retired blocks are evicted first, despite hints, until a request uses them or their
        version is kept again. A block needed by a lease, a move, a pin or a child is not dropped. A
        pass over all blocks is a call without `start`, and a call per returned place. The cost of
        a call depends on `blocks` alone.

        Args:
            keep: versions to evict by hints and policies.
            retire: versions to evict first.
            others: action on blocks of all remaining versions.
            blocks: the number of blocks to visit.
            now: the time.
            start: the place to continue from. None for the first call of a pass.

        Returns:
            The place for the next call of the pass, None after the last call. The number of blocks
            retired, kept again or dropped. The number of blocks to drop, but still in use.

        Raises:
            ConfigError: a version other than a str, an unknown word, or a number out of range.
        """

    def expected_sessions(
        self, limit: int | None = None, *, now: int, scope: Scope | None = None
    ) -> list[tuple[str, float]]:
        """Return the sessions most likely to resume soon, the likeliest first.

        For an engine that then hints `Prefetch(session=...)`. The manager makes no calls. Only
        waiting sessions are named: without a lease, and not released. Empty unless the policy of
        some tier learns, as `learned` does.

        Args:
            limit: maximum number. None names all.
            now: the time. The result does not depend on it: pauses are counted in requests.
            scope: the scope of the sessions.

        Returns:
            Names, each with the expected uses per request of the session's last block.

        Raises:
            ConfigError: the scope was first used with another structure.
        """

    def unpriced(self, limit: int | None = None) -> Unpriced:
        """Return blocks without a cost, in the order of their handles' ids.

        Each call returns them again until `set_costs`. Until then the default cost ranks them.

        Args:
            limit: maximum number. None for all.

        Raises:
            ConfigError: the manager was not made with `cost="python"`.
        """

    def set_costs(
        self, ids: int | Iterable[int] | NDArray[np.uint64], costs: Iterable[float], *, now: int
    ) -> int:
        """Set the cost of recomputing a token of each block, in one unit for all blocks.

        It replaces the cost model's number: under `retention` a block is worth uses x cost / idle,
        under `flat` cost / idle. Policies with state per block apply it from the block's next use.

        Args:
            ids: handles of blocks. Handles of removed blocks are skipped. They name no other block.
            costs: a cost per block, finite and above 0.
            now: the time.

        Returns:
            Number of blocks that still exist.

        Raises:
            ConfigError: a wrong number of costs, a cost that is not finite and above 0, or a
                manager made without `cost="python"`. Nothing has changed then.
        """

    def explain(
        self, block: _Block, *, now: int, tier: _Tier = 0, layer: int | None = None
    ) -> Explanation:
        """Return the price and the rank of a block on a tier, by the code that ranks victims.

        Args:
            block: which block.
            now: the time.
            tier: on which tier.
            layer: the price of this layer alone, as if demotion took it next. None prices the
                next layers to leave. The rank is always the rank of the block.

        Raises:
            ConfigError: the block or the layer is not on the tier.
        """

    def explain_miss(
        self,
        tokens: _Tokens,
        *,
        now: int,
        scope: Scope | None = None,
        session: str | None = None,
        limit: int = 8,
    ) -> Miss:
        """Explain why tokens of a prompt would be computed now. Changes nothing.

        A prompt diverges from the cached sequences at some token. Up to `limit` cached branches
        there are compared with the rest of the prompt: the branch of the request's session, the
        branch with the longest common prefix among the newest 64, then the newest. The call copies
        their tokens. The first read of the answer compares them, without a lock.

        Args:
            tokens: the prompt.
            now: the time.
            scope: the scope of the prompt. Blocks, sessions and scopes of other tenants never
                influence the answer.
            session: the prompt's conversation.
            limit: maximum number of branches, 0 to 64. With 0 no branch is copied or compared, and
                "new" tokens of the answer may be "diverged".

        Raises:
            ConfigError: invalid tokens or an invalid scope, as for `lookup`.
        """

    def cost(
        self, layer: int, block: int, session_blocks: int, context: int, *, tier: _Tier = 0
    ) -> float:
        """Return the cost of a layer of a demoted block, as the tier's policy ranks it.

        In the unit of `Cost`, with the policy's weights of the layer and of the position.

        Args:
            layer: the layer.
            block: index of the block in its session.
            session_blocks: blocks of the session.
            context: tokens before the block.
            tier: the tier of the policy.

        Raises:
            ConfigError: an unknown layer or tier, or a block beyond the session's end.
        """

    def sessions(self, *, scope: Scope | None = None) -> list[tuple[str, int, NDArray[np.uint64]]]:
        """Return every named session of a scope.

        A session is kept while it has a lease or a cached block, until a hint releases it. At most
        eight sessions without a lease end in one block. Beyond that the least recently used session
        is forgotten.

        Args:
            scope: the scope of the sessions.

        Returns:
            For each session its name, length in blocks, and handles of its cached blocks,
            `uint64[n]`.
        """

    def layer_tiers(self, block: _Block) -> NDArray[np.int8]:
        """Return the fastest tier of each layer of a block, `int8[layers]`, or -1.

        Raises:
            ConfigError: the block is not cached.
        """

    def stats(self) -> Stats:
        """Return counters of requests, tiers and lanes, and present contents, at a moment.

        Takes a few microseconds, so an engine may call it at each step.
        """

    def evictions(self, limit: int | None = None) -> list[Eviction]:
        """Return the last entries of the eviction log, oldest first. They stay in the log.

        The log has room for `eviction_log` entries; `reset` empties it.

        Args:
            limit: maximum number of entries, the newest. None returns all.
        """

    def take_events(self) -> list[Event]:
        """Take the events since the last call, at most the last `events`.

        Residency events, replayed in order, give the valid layers of every copy. A leaving copy
        counts as gone. Events taken together with one time are its net effect: first departures,
        children before parents, then arrivals, parents before children.
        """

    def snapshot(self) -> bytes:
        """Return the whole state, readable. Equal for equal states. Ignores times and counters."""

    def reset(self) -> None:
        """Forget all blocks and the time: the next call may have any time.

        Settings and counters stay, lanes are idle, and resident blocks count as evicted.

        Raises:
            ConfigError: a lease is held or a move has not ended.
        """

    def audit(self) -> None:
        """Check every invariant from scratch. For tests.

        Raises:
            InvariantError: an invariant is broken. Every later call raises it too.
        """

    def close(self) -> None:
        """End the manager and all leases. Later calls raise `ClosedError`."""

@final
class Lease:
    """A request's hold on blocks and slots; a context manager releases it at the end.

    The object is only a name: dropping it releases nothing, and `BlockManager.lease(id)` returns
    it again. After the release only `id`, `state` and `release` work. The rest raises
    `ClosedError`.
    """

    @property
    def id(self) -> int:
        """Its id, never used twice."""

    @property
    def session(self) -> str | None:
        """The name of its session."""

    @property
    def state(self) -> Literal["active", "suspended", "released"]:
        """Whether it holds its blocks, only its tokens, or nothing."""

    @property
    def plan(self) -> Plan:
        """The plan as of now: blocks to reuse, load and compute. A failed move changes it."""

    @property
    def matched(self) -> int:
        """Tokens covered by the plan, a multiple of the block size. Compute the rest."""

    @property
    def tokens(self) -> int:
        """Number of its tokens: the match and the committed tokens."""

    @property
    def handles(self) -> NDArray[np.uint64]:
        """Handles of its full blocks in logical order, `uint64[n]`; empty while suspended."""

    @property
    def room(self) -> int | None:
        """Number of further tokens with reserved slots, until the next `reserve`.

        None if the engine owns the slots.
        """

    @property
    def after(self) -> NDArray[np.uint64]:
        """Moves to wait for before reading or writing its slots, `uint64[n]`."""

    def ready(self) -> bool:
        """Whether `after` is empty."""

    def slots(self, tier: _Tier = 0, group: int = 0) -> NDArray[np.uint32]:
        """Return the block table in logical order. On the first tier, reserved slots follow.

        Between two calls of the lease only failed loads change the first tier's table, at the
        failed blocks and after them. A slot of the lease is never taken back.

        Args:
            tier: index or kind of the tier.
            group: which group of layers, if groups are kept apart. In a group after the first, a
                slot on the first tier is held by the lease, or to be written before the block is
                committed. A block without a slot is not kept in the group. A block left partial
                by a commit may get its slot by that commit.

        Returns:
            `uint32[blocks]`, or `uint32[layers, blocks]` on a tier with layer slots; 2**32 - 1
            for a block that is not on the tier, or has no slot bound.

        Raises:
            ConfigError: an unknown tier or group.
        """

    def reserve(self, tokens: int, *, now: int) -> None:
        """Allocate slots for more tokens after the present tokens, unless there is room already.

        A tail shared with a fork is copied first: see `after`.

        Args:
            tokens: number of tokens of the next commits.
            now: the time.

        Raises:
            NoSpaceError: the first tier lacks room for them.
        """

    def bind(self, first_block: int, slots: _Ids, group: int = 0) -> None:
        """Bind the lease's blocks to slots of a tier owned by the engine.

        Args:
            first_block: index of the first block on the lease's path.
            slots: slots of this and the following blocks.
            group: the slots' group of layers, if groups are kept apart. Slots of all groups share
                one numbering. A commit that ends at a border of `Plan.resume` stores the blocks
                needed at the border. Once the stores have ended, the engine may reuse slots
                outside the attention of later tokens.

        Raises:
            ConfigError: the engine does not own the first tier, a block is bound to another slot,
                the group is unknown, or a slot belongs to another group.
        """

    def unbind(self, first_block: int, group: int) -> None:
        """Forget the slots of earlier blocks in a group of layers: no later commit stores them.

        For an engine that may have reused a part of the slots.

        Args:
            first_block: index on the lease's path of the first block to keep its slot.
            group: the group of layers, after the first.

        Raises:
            ConfigError: the engine does not own the first tier, or the group is unknown.
        """

    def load(
        self,
        layers: tuple[int, int] | None = None,
        blocks: tuple[int, int] | None = None,
        *,
        now: int,
    ) -> NDArray[np.uint64]:
        """Start the loads left out by `acquire(load="none")` or `resume(load="none")`.

        Args:
            layers: first layer, and last layer plus 1; all by default. A block requested in part
                is loaded from one end of its missing layers.
            blocks: first block of the match, and last block plus 1; all by default. An engine with
                the first blocks in private slots loads the rest. In the plan, blocks left out are
                computed: the first commit confirms them as written, by any writer.
            now: nanoseconds.

        Returns:
            The moves, `uint64[n]`.

        Raises:
            NoSpaceError: no room for blocks on their way through a tier.
            ConfigError: unknown layers or blocks, or layers that would leave a gap.
        """

    def store_ahead(self, blocks: tuple[int, int] | None = None, *, now: int) -> NDArray[np.uint64]:
        """Start the stores of blocks before the engine writes and commits them.

        For a first tier owned by the engine. `commit` adopts the copies instead of starting stores.
        Copies of already stored blocks are freed, as are copies taken back by `release`,
        `suspend`, a failed load or `drop_ahead`, once no move writes them. The moves have no block
        and no `after`. They may run as soon as the block's slot is written (or layer by layer), and
        must run before it is written again. An `Executor` runs them at once.

        Args:
            blocks: first block of the lease, and last block plus 1, after its committed blocks.
                All blocks with slots by default.
            now: nanoseconds.

        Returns:
            The moves, `uint64[n]`. None for a slot that another lease has stored ahead. Only for
            the first blocks if the next tier lacks free slots. None at all if a commit would
            not store the blocks: the first tier must write through, into memory, and admit at the
            first use.

        Raises:
            ConfigError: the engine does not own the first tier, or the blocks have no slots, or are
                committed.
        """

    def drop_ahead(self, *, now: int) -> None:
        """Take back the stores of `store_ahead` not yet adopted by `commit`.

        For an engine that will write other tokens than expected.
        """

    def commit(self, new_tokens: _Tokens, *, now: int) -> Committed:
        """Append tokens with written KV. Full blocks are cached from then on.

        The first commit also confirms the plan's recomputed tokens as written. It may be empty.

        Args:
            new_tokens: the tokens after the present tokens. Their KV is in the lease's slots.
            now: the time.

        Returns:
            Handles of the new blocks, and the slots of blocks that another lease committed first.

        Raises:
            ConfigError: no room for the tokens, or moves of `after` have not ended.
        """

    def truncate(self, tokens: int, *, now: int) -> None:
        """Keep the first `tokens` tokens. Blocks after them stay cached.

        A cut inside a block needs `reserve` before the next commit, which copies the block's front.
        If groups of layers are kept apart the lease may keep fewer tokens, up to a border where
        all groups can continue, since no state is rolled back.

        Args:
            tokens: maximum number of tokens to hold afterwards.
            now: the time.

        Raises:
            ConfigError: the lease holds fewer tokens.
        """

    def fork(self, n: int, *, now: int) -> list[Lease]:
        """Return new leases over the same tokens, sharing all blocks.

        All of them and this lease need `reserve` before the next commit, which copies a partial
        block. If groups of layers are kept apart they also wait for copies of the windows and
        states that this lease still writes: see `after`.

        Args:
            n: number of leases.
            now: the time.

        Raises:
            ConfigError: a part of the plan is still to be loaded or computed.
            NoSpaceError: there is no room for the copies.
        """

    def suspend(self, to: _Kind = "host", *, now: int) -> NDArray[np.uint64]:
        """Give the memory back and keep the tokens. Never fails for lack of room.

        Args:
            to: kind of the second tier. Blocks are written there while it has room, and dropped
                otherwise.
            now: the time.

        Returns:
            Moves still using slots owned by the engine, `uint64[n]`.

        Raises:
            ConfigError: the second tier is of another kind.
        """

    def resume(self, reserve: int = 0, *, now: int, load: _Load = "plan") -> Plan:
        """Plan again for a suspended lease; commit blocks that are not `matched` again.

        Args:
            reserve: number of tokens to allocate after its end.
            now: the time.
            load: which blocks to load, as for `acquire`.

        Raises:
            NoSpaceError: no room. The lease stays suspended.
            ConfigError: the lease is not suspended.
        """

    def release(self, *, now: int | None = None) -> NDArray[np.uint64]:
        """End the lease. Its blocks stay cached. A second release does nothing.

        Args:
            now: the time. None is the latest time seen by the manager.

        Returns:
            Moves still using slots owned by the engine, `uint64[n]`.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Match:
    """The longest usable prefix of a sequence.

    Attributes:
        tokens: number of covered tokens of the sequence.
        handles: handles of its blocks in logical order, `uint64[n]`.
        blocks: its blocks in logical order, as of the first read. A block removed by then has no
            tokens and no copies.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def handles(self) -> NDArray[np.uint64]: ...
    @property
    def blocks(self) -> tuple[MatchedBlock, ...]: ...
    def resident(self, tier: _Tier, *, skip: int = 0) -> int:
        """Return the number of its leading blocks with all layers on a tier now.

        Arriving and leaving copies do not count, and removed blocks do not count. Cheaper than
        reading `blocks`.

        Args:
            tier: the tier.
            skip: number of first blocks to pass over.

        Raises:
            ConfigError: an unknown tier, or a match with fewer blocks.
        """

    def resumable(self, tier: _Tier, *, skip: int = 0) -> int:
        """Return the number of its blocks up to the last border resumable from a tier now.

        Equal to `resident` with a single group of layers.

        Args:
            tier: the tier.
            skip: number of first blocks to leave out.

        Raises:
            ConfigError: as for `resident`.
        """

@final
class Miss:
    """Explanation of a miss: why the tokens of a prompt are computed.

    Attributes:
        tokens: tokens of the prompt.
        found: tokens found with a complete copy, per tier, counted on the fastest tier with a copy.
        diverged_at: index of the first token different from the cached branches, also inside a
            block. None if nothing is cached there, or the prompt ends before it diverges.
        divergence: content key of the prompt's last block in common with the branches. None if the
            prompt diverges in the first block, or does not diverge.
        branches: the cached branches at that token.
        evicted: tokens after the match that were cached once and evicted. Known under a policy that
            remembers evicted blocks (`learned` does), or with `explain=True`.
        in_flight: known tokens without a complete copy yet.
        other_scope: tokens after the match, cached by the same tenant for a different adapter, or
            for a different digest at the divergence.
        recomputed: tokens of the match that are expected to be computed faster than loaded.
        causes: for each range of computed tokens, the first token, the last plus 1, and the cause:
            "new", "diverged" (at least .3 of the tokens after the divergence recur in a branch),
            "evicted", "other scope", "no resume point" (cached, but a group of layers lacks its
            windows or its state there), "not stored yet", "recomputed" or "not cacheable" (the last
            block is not full).
    """

    @property
    def tokens(self) -> int: ...
    @property
    def found(self) -> list[int]: ...
    @property
    def diverged_at(self) -> int | None: ...
    @property
    def divergence(self) -> bytes | None: ...
    @property
    def branches(self) -> list[MissBranch]: ...
    @property
    def evicted(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def other_scope(self) -> int: ...
    @property
    def recomputed(self) -> int: ...
    @property
    def causes(self) -> list[tuple[int, int, str]]: ...

@final
class MissBranch:
    """Cached branch at the point where a prompt diverges.

    Attributes:
        tokens: its tokens from the divergence on, at most 64, `uint32[n]`.
        cached: tokens cached after the divergence, along the newest blocks, at most 131 072.
        idle: nanoseconds since the last use of its first block.
        session: the session at its end, or None.
        recurring: tokens of the prompt after the divergence in runs of at least 16 tokens that also
            occur in the branch, at any offset.
    """

    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def cached(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def recurring(self) -> int: ...

@final
class MatchedBlock:
    """A block of a match.

    Attributes:
        block: its handle.
        tokens: its tokens, `uint32[block_tokens]`. Digests appear as numbers from 0x80000000 on.
        copies: its copies, fastest tier first. Empty for a hole.
    """

    @property
    def block(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def copies(self) -> tuple[Copy, ...]: ...

@final
class Copy:
    """A copy of a block on a tier.

    Attributes:
        tier: index of the tier.
        group: group of layers, if groups are kept apart. Layers count within the group.
        slot: its slot. With layer slots, the slot of its first expected layer.
        slots: its slots: a single slot, or with layer slots a slot per expected layer.
        layer_lo: first valid layer now.
        layer_hi: last valid layer now, plus 1.
        coming_lo: first valid layer at `ready`.
        coming_hi: last valid layer at `ready`, plus 1.
        first: expected time of the first arriving layer, in nanoseconds.
        ready: expected time of all arriving layers, in nanoseconds.
        leaving: whether it was chosen as a victim. It is valid until the store reading it has
            ended. A request that finds it before its slots are promised keeps the copy.
    """

    @property
    def tier(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def slots(self) -> NDArray[np.uint32]: ...
    @property
    def layer_lo(self) -> int: ...
    @property
    def layer_hi(self) -> int: ...
    @property
    def coming_lo(self) -> int: ...
    @property
    def coming_hi(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def leaving(self) -> bool: ...

@final
class Plan:
    """Steps to bring a request's match to the first tier, and the predicted end of the prompt.

    Spans cover only the match: the engine computes the rest of the prompt after the positions to
    recompute.
    """

    @property
    def spans(self) -> list[Span]:
        """The actions on ranges of tokens and layers, in logical order."""

    @property
    def finish(self) -> int:
        """Predicted time at which the whole prompt is computed, in nanoseconds.

        Counts the loads, including waits for their lanes, the recomputed tokens of the match, and
        all tokens after the match, without the tokens of `reserve`. Recomputation overlaps with
        loads. The rest of the prompt begins once the whole match is there. Under
        `acquire(layerwise=True)` each layer of it begins once the same layer of the match is there:
        then all computation is one pass, and the loads of a lane bring layer 0 of all their blocks
        first.
        """

    @property
    def exact(self) -> bool:
        """Whether no plan can finish earlier, if lanes and costs are predicted correctly."""

    @property
    def resume(self) -> list[int]:
        """Token borders after the match at which a pass should end, ascending.

        Each border becomes a resume point once committed. With states only if a pass, and so a
        commit, ends there. Empty for a model with a single group of layers.
        """

    def recompute(self, layer: int | None = None) -> NDArray[np.int64]:
        """Return the ascending positions of the KV to write at `layer`, `int64[n]`.

        Args:
            layer: the model layer. None gives the positions of all layers together.

        Raises:
            ConfigError: an unknown layer.
        """

    def ready(self, layer: int) -> int:
        """Return the predicted time at which a layer of the match is there, in nanoseconds.

        A span of `n` blocks and `l` layers counts as `n` equal transmissions in a row: layer `i` of
        it is there at `ready - (l - 1 - i) * (ready - first_ready) / (n * l - 1)`. 0 without
        reused or loaded blocks.

        Args:
            layer: the model layer.

        Raises:
            ConfigError: an unknown layer.
        """

@final
class Span:
    """Action on some layers of consecutive tokens.

    Attributes:
        start: first token.
        stop: the last token plus 1.
        layer_lo: first layer.
        layer_hi: the last layer plus 1.
        action: the action.
        tier: index of the tier with the bytes.
        first_ready: predicted time of the first layer, in nanoseconds.
        ready: predicted time of all layers, in nanoseconds.
    """

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def layer_lo(self) -> int: ...
    @property
    def layer_hi(self) -> int: ...
    @property
    def action(self) -> Literal["reuse", "load", "recompute"]: ...
    @property
    def tier(self) -> int: ...
    @property
    def first_ready(self) -> int: ...
    @property
    def ready(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Moves:
    """Moves in topological order, as columns of equal length.

    Moves travel between processes as bytes, or pickled.

    Attributes:
        LOAD: the kind of a move to a faster tier.
        STORE: the kind of a move to a slower tier.
        COPY: the kind of a move within the first tier.
        id: ids, never used twice.
        kind: purposes: `LOAD`, `STORE` or `COPY`.
        lease: leases that requested them, or the first waiting leases. 0 for none.
        block: handles of the blocks. 2**64 - 1 for a block that is partial, or not committed yet.
        key: content hashes of the blocks, `uint8[n, 32]`. Zeros unless a disk or remote tier
            takes part.
        src: indices of the tiers to read.
        dst: indices of the tiers to write.
        src_slot: slots to read: layer slots if the tier has them.
        dst_slot: slots to write: layer slots if the tier has them.
        group: layer groups.
        layer_lo: first layers.
        layer_hi: the last layers plus 1.
        after: moves to succeed on all ranks before these start on any. 0 for none.
        tokens: valid tokens of the blocks: fewer than a block only for copies.
        label: `bytes` that a disk or remote tier stores with each block, for a later manager to
            find the block. Empty for other destinations.
    """

    LOAD: ClassVar[Literal[0]]
    STORE: ClassVar[Literal[1]]
    COPY: ClassVar[Literal[2]]

    @property
    def id(self) -> NDArray[np.uint64]: ...
    @property
    def kind(self) -> NDArray[np.uint8]: ...
    @property
    def lease(self) -> NDArray[np.uint64]: ...
    @property
    def block(self) -> NDArray[np.uint64]: ...
    @property
    def key(self) -> NDArray[np.uint8]: ...
    @property
    def src(self) -> NDArray[np.uint8]: ...
    @property
    def dst(self) -> NDArray[np.uint8]: ...
    @property
    def src_slot(self) -> NDArray[np.uint32]: ...
    @property
    def dst_slot(self) -> NDArray[np.uint32]: ...
    @property
    def group(self) -> NDArray[np.uint8]: ...
    @property
    def layer_lo(self) -> NDArray[np.uint16]: ...
    @property
    def layer_hi(self) -> NDArray[np.uint16]: ...
    @property
    def after(self) -> NDArray[np.uint64]: ...
    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def label(self) -> list[bytes]: ...
    def by_layer(self, layer: int) -> Moves:
        """Return the moves with a layer, cut to this layer.

        Ids stay: report progress by `layers_done` until all layers of a move are done.
        """

    def of_layers(self, layers: int) -> Moves:
        """Return the moves of whole blocks for a rank with `layers` layers of the model.

        Pipeline stages have unequal numbers of layers. A manager of whole blocks need not know
        them.

        Raises:
            ConfigError: a number outside 1 to 65 535.
        """

    def together(
        self, tiers: Sequence[int] | NDArray[np.integer[Any]]
    ) -> tuple[list[Moves], Moves]:
        """Group the moves that can be copied together.

        Args:
            tiers: indices of the tiers with grouped copies.

        Returns:
            Groups of moves between these tiers without a move in `after`: each group has one kind,
            lease, pair of tiers and range of layers. And the remaining moves, in their order.

        Raises:
            ConfigError: a tier that is no number from 0 to 255.
        """

    def to_bytes(self) -> bytes:
        """Return the columns as bytes.

        All numbers are little-endian: the magic `kvtrmove`, version `u32` = 2, zero `u32`, number
        of moves `u64`, then the columns, without padding between them, in the order and types
        id, kind, lease, block, key, src, dst, src_slot, dst_slot, group, layer_lo, layer_hi,
        after, tokens, length of the label `u32`. The labels follow.
        """

    @staticmethod
    def from_bytes(data: bytes) -> Moves:
        """Decode the result of `to_bytes`.

        Raises:
            ConfigError: bytes of another format or version, cut short, or with invalid moves.
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int | np.integer[Any], /) -> Move: ...
    @overload
    def __getitem__(
        self, index: slice | Sequence[int] | NDArray[np.bool_ | np.integer[Any]], /
    ) -> Moves:
        """Return the moves of a slice, of a mask or at indices, in numpy's order."""

    def __iter__(self) -> Iterator[Move]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Move:
    """A move: copy layers of a block from slot to slot.

    Attributes:
        id: its id, never used twice.
        kind: `Moves.LOAD`, `Moves.STORE` or `Moves.COPY`.
        lease: the lease that requested it, or the first waiting lease. 0 for none.
        block: handle of the block. 2**64 - 1 for a block that is partial, or not committed yet.
        key: content hash of the block, 32 bytes. Zeros unless a disk or remote tier takes part.
        src: index of the tier to read.
        dst: index of the tier to write.
        src_slot: slot to read: a layer slot if the tier has them.
        dst_slot: slot to write: a layer slot if the tier has them.
        group: layer group.
        layer_lo: first layer.
        layer_hi: the last layer plus 1.
        after: the move to succeed on all ranks before this move starts on any. 0 for none.
        tokens: valid tokens of the block: fewer than a block only for a copy.
        label: bytes that a disk or remote tier stores with the block. Empty for other destinations.
    """

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def lease(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def src_slot(self) -> int: ...
    @property
    def dst_slot(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def layer_lo(self) -> int: ...
    @property
    def layer_hi(self) -> int: ...
    @property
    def after(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def label(self) -> bytes: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class DiskStore:
    """The files of a store, for `kvtrie.tiers.disk.DiskStorage`.

    Calls leave the interpreter to other threads while files are read and written.

    Attributes:
        folder: the store's own folder.
        read_only: whether writes are refused: another process writes, the folder forbids it, or the
            folder was removed or replaced while it was open.
        refusal: the reason for `read_only`, or None.
        about: meaning of its KV, as JSON.
        layers: layers of a block.
        layer_bytes: bytes of a layer of a block.
        block_tokens: tokens of a block.
        slots: maximum number of blocks.
        slot_bytes: bytes of a block on disk.
        disk_bytes: present size of its files, in bytes.
        travel: whether bytes bypass the page cache, the queue in use, and the reasons for any
            difference from the request.
    """

    def __new__(
        cls,
        folder: str | PathLike[str],
        *,
        identity: bytes,
        about: str,
        layers: int,
        layer_bytes: int,
        block_tokens: int,
        blocks: int,
        durability: str = "flush",
        io: str = "direct",
        queue: str = "best",
    ) -> Self: ...
    @staticmethod
    def inspect(folder: str | PathLike[str]) -> DiskStore:
        """Open the store in its own folder, as its manifest describes it."""

    @staticmethod
    def stores(folder: str | PathLike[str]) -> list[tuple[Path, str | None]]:
        """Return the own folder of each store in a folder, and the fault of an unreadable store."""

    @staticmethod
    def blocks_in(budget: int, layers: int, layer_bytes: int, block_tokens: int) -> int:
        """Return the number of blocks within a budget in bytes, all files counted.

        `layer_bytes` is the size in the layout, padding included.
        """

    @staticmethod
    def bytes_for(blocks: int, layers: int, layer_bytes: int, block_tokens: int) -> int:
        """Return the maximum size of all files for a number of blocks, in bytes."""

    @property
    def folder(self) -> Path: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def about(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def travel(self) -> tuple[bool, str, list[str]]: ...
    def read_many(
        self,
        blocks: Sequence[tuple[bytes, int, tuple[int, int], NDArray[np.uint8]]],
        *,
        depth: int = 8,
    ) -> list[str | None]:
        """Read blocks as `read` does, given as its arguments, up to `depth` of them at once.

        Returns the reason of its failure, or None, for each block.
        """

    def write_many(
        self,
        blocks: Sequence[tuple[bytes, int, tuple[int, int], NDArray[np.uint8], bytes]],
        wall: int,
        *,
        depth: int = 8,
    ) -> list[str | None]:
        """Write blocks as `write` does, given as its arguments, up to `depth` of them at once.

        Returns the reason of its failure, or None, for each block.
        """

    def read(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: NDArray[np.uint8]
    ) -> None:
        """Read layers of a block into `memory`, `uint8[layers, layer_bytes]`, and verify them."""

    def write(
        self,
        key: bytes,
        slot: int,
        layers: tuple[int, int],
        memory: NDArray[np.uint8],
        label: bytes,
        wall: int,
    ) -> None:
        """Write layers of a block from `memory` at the wall clock `wall`, in nanoseconds."""

    def index(self, wall: int, *, group: int = 0) -> Index:
        """Return the index of the store's blocks, as rows of a group, with ages as of `wall`."""

    def save(self, index: Index, wall: int, *, group: int = 0) -> None:
        """Keep exactly the blocks of an index in a group, and free every other slot."""

    def note_uses(self, index: Index, wall: int, *, group: int = 0) -> int:
        """Persist ages and uses of the blocks of an index in a group, for the next process.

        Changes nothing else. Rows that name a wrong block for their slot are left out. Nothing is
        synced: a power loss may lose the noted ages and uses, never a block.

        Args:
            index: a result of `BlockManager.index` for some blocks.
            wall: the wall clock in nanoseconds.
            group: group of the rows to read.

        Returns:
            Number of stored blocks among the rows.

        Raises:
            ConfigError: an unknown slot.
            TransferError: the device failed, or the store is read-only.
        """

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Return every block as a readable row.

        Returns:
            Slot, key, first layer, last layer plus 1, nanoseconds since the last use, uses, and
            whether all blocks before it are there too.
        """

    def verify(
        self, progress: Callable[[int, int], object] | None = None
    ) -> list[tuple[int, bytes, str]]:
        """Read and verify every block, and remove damaged blocks of a writable store.

        For tests: a single call, uninterrupted by Ctrl-C. `kvtrie disk verify` goes block by block.

        Args:
            progress: called with the number of blocks done and of all blocks.

        Returns:
            Slot, key and reason of each unverified block.
        """

    def gc(self) -> int:
        """Free the space of free slots and dead entries, and return the number of bytes."""

    def clear(self, first: int, end: int) -> None:
        """Free the slots from `first` to before `end`, and give their space back."""

    def remove(self, slot: int) -> None:
        """Free a slot."""

    def sync(self) -> None:
        """Make all written data durable."""

    def reasons(self) -> list[str]:
        """Return and clear the reasons of skipped or removed blocks."""

    def close(self) -> None:
        """Write the data still in memory and release the lock. A second close does nothing."""

@final
class KeptFile:
    """Table of the slots of a host pool in a memory file.

    Attributes:
        path: its path.
        about: meaning of its KV, as JSON.
        layers: layers of a block.
        layer_bytes: bytes of a layer of a block.
        block_tokens: tokens of a block.
        slots: maximum number of blocks.
        identity: the digest of `about`.
        pool: start of the pool in the file, and length of the file.
        found: whether it is the file of an earlier process.
        cold: why the blocks of an earlier file cannot be used, or None if there was none.
        descriptor: the descriptor to map.
        sealed: slots that the next process would find.
        unverified: slots of earlier processes not yet verified or written.
        lost: number of lost blocks, by reason.
    """

    @staticmethod
    def open(
        path: str | PathLike[str],
        *,
        identity: bytes,
        about: str,
        layers: int,
        layer_bytes: int,
        block_tokens: int,
        blocks: int,
        replace: bool = False,
    ) -> tuple[KeptFile | None, int | None, bool]:
        """Open a file for its only writer, or reserve the space for a new file.

        A new file, or a file with unusable blocks, is made when the first slot is written. Closed
        before that, it is unchanged.

        Returns:
            The file. None if another process has its lock, then with the id of that process, if
            known, and whether it has died.

        Raises:
            ConfigError: no memory file system, another user's file, or a file with foreign content
                unless `replace`.
            TransferError: no room.
        """

    @staticmethod
    def inspect(path: str | PathLike[str]) -> KeptFile:
        """Open a file with the settings of its header and without its lock, for tools."""

    @property
    def path(self) -> Path: ...
    @property
    def about(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def pool(self) -> tuple[int, int]: ...
    @property
    def found(self) -> bool: ...
    @property
    def cold(self) -> str | None: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def sealed(self) -> int: ...
    @property
    def unverified(self) -> int: ...
    @property
    def lost(self) -> dict[str, int]: ...
    def begin(
        self, slots: Sequence[int], keys: Sequence[bytes], layers: tuple[int, int]
    ) -> list[str | None]:
        """Mark slots as being written, before the first byte is written.

        Returns:
            An error or None for each.
        """

    def finish(
        self, slots: Sequence[int], keys: Sequence[bytes], ok: bool
    ) -> list[tuple[int, int, tuple[int, int]]]:
        """Record the end of copies into slots.

        Returns:
            Slot, generation and layers of each slot to seal now.
        """

    def seal(
        self,
        slots: Sequence[tuple[int, int, tuple[int, int], NDArray[np.uint8], bytes]],
        wall: int,
    ) -> int:
        """Seal slots, given with the memory of their layers and their labels, and count them."""

    def layers_to_verify(self, slot: int) -> tuple[int, int] | None:
        """Return the layers to verify before the first use of a slot, if any.

        Raises:
            TransferError: it is damaged.
        """

    def verify_block(self, slot: int, key: bytes, memory: NDArray[np.uint8]) -> None:
        """Verify the block of an earlier process by the memory of its layers.

        Raises:
            TransferError: it is damaged, or another block.
        """

    def index(self, wall: int, slots: NDArray[np.int64] | None = None) -> Index:
        """Return the index of its blocks. `slots` renumbers them. Below 0 leaves a block out."""

    def note_uses(self, index: Index, wall: int, slots: NDArray[np.int64] | None = None) -> int:
        """Record the ages and uses of the blocks of an index, renumbered by `slots`."""

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Return every block as a readable row, as for `DiskStore`."""

    def verify(self, slot: int, key: bytes) -> None:
        """Read a slot through the file and verify it, for tools.

        Raises:
            TransferError: it is damaged, or another block.
        """

    def close(self) -> None:
        """Release the lock once no other call runs. A second close does nothing."""

@final
class Index:
    """Blocks on a tier, parents before their children, as columns of equal length.

    Attributes:
        key: content hashes of the blocks, `uint8[n, 32]`.
        slot: their slots.
        layer_lo: first layers on the tier.
        layer_hi: the last layers plus 1.
        age: nanoseconds since their last use.
        uses: numbers of uses.
        session_blocks: blocks of their sessions. 0 for no session.
        group: their groups of layers. Rows of a group after the first follow the block's row in the
            first group, and exist for blocks needed by resume points.
    """

    def __new__(
        cls, rows: Iterable[tuple[bytes, int, int, int, *tuple[int, ...]]] | None = None
    ) -> Self:
        """Make an index from rows.

        Args:
            rows: tuples (label, slot, layer_lo, layer_hi), with the group as a fifth element after
                the first group. Iterating an index returns the same tuples.

        Raises:
            ConfigError: an invalid label or number.
        """

    @property
    def key(self) -> NDArray[np.uint8]: ...
    @property
    def slot(self) -> NDArray[np.uint32]: ...
    @property
    def layer_lo(self) -> NDArray[np.uint16]: ...
    @property
    def layer_hi(self) -> NDArray[np.uint16]: ...
    @property
    def age(self) -> NDArray[np.uint64]: ...
    @property
    def uses(self) -> NDArray[np.uint32]: ...
    @property
    def session_blocks(self) -> NDArray[np.uint32]: ...
    @property
    def group(self) -> NDArray[np.uint8]: ...
    def __len__(self) -> int: ...
    def __add__(self, value: Index, /) -> Index:
        """Return the rows of both, the right rows last."""

    def __radd__(self, value: Index, /) -> Index: ...
    def __iter__(self) -> Iterator[tuple[bytes, int, int, int, *tuple[int, ...]]]: ...

@final
class Committed:
    """Result of a commit.

    Attributes:
        new: handles of the blocks that entered the trie, `uint64[n]`.
        duplicate: private slots of blocks that another lease has committed and still uses,
            `uint32[k]`. They stay the lease's until release.
        canonical: handles of the blocks cached instead, in the order of `duplicate`, `uint64[k]`.
        ahead: number of new blocks stored by `store_ahead`, with copies adopted by the commit.
    """

    @property
    def new(self) -> NDArray[np.uint64]: ...
    @property
    def duplicate(self) -> NDArray[np.uint32]: ...
    @property
    def canonical(self) -> NDArray[np.uint64]: ...
    @property
    def ahead(self) -> int: ...

@final
class Failed:
    """Tokens that failed to arrive as planned.

    Attributes:
        lease: the lease concerned, or 0.
        block: handle of the block. None for a partial block.
        start: first token on the lease's path.
        stop: the last token plus 1.
        reason: the executor's error.
    """

    @property
    def lease(self) -> int: ...
    @property
    def block(self) -> int | None: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def reason(self) -> str: ...

@final
class Explanation:
    """The price of a block on a tier at a time.

    `value = cost / idle` with `cost` the product of terms and weights (Pensieve, Section 4.3.1).
    Factors unused by the policy are 1.

    Attributes:
        cost: the product of all terms and weights.
        terms: cost of recomputing a token of the block, and number of its uses.
        weights: weight of the layers that would leave, and of the block's position in its
            session.
        idle: nanoseconds since the last use.
        value: retention value: cost per second of idle time, infinite at zero idle time.
        priority: 35 unless a hint names it. Lower priorities leave the tier first, whatever the
            value. Also 35 while the tier retains its maximum number of blocks.
        rank: number of copies that leave the tier before it. None while it cannot be a victim.
        layers: the layers of the price: first, and last plus 1.
        words: under `learned` a description of the class of the block's last use, the counted
            lives and the resulting value. None under other policies.
    """

    @property
    def cost(self) -> float: ...
    @property
    def terms(self) -> dict[Literal["base", "uses"], float]: ...
    @property
    def weights(self) -> dict[Literal["layer", "position"], float]: ...
    @property
    def idle(self) -> int: ...
    @property
    def value(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def words(self) -> str | None: ...

@final
class EventBatches:
    """Encoder of a manager's block events, for `kvtrie.cluster.Publisher`.

    Args:
        manager: made with `events_of="residency"`.
        mediums: the medium of each tier. None for an unpublished tier.
        hashes: name of a block: "int" for the last 8 bytes of its content key, "bytes" for the key.
        form: each event as a "map" or an "array".
        rank: data-parallel rank of the engine.

    Raises:
        ConfigError: a wrong argument, a manager without residency events, or with an open encoder
            already.
    """

    def __new__(
        cls,
        manager: BlockManager,
        mediums: Sequence[str | None],
        *,
        hashes: Literal["int", "bytes"],
        form: Literal["map", "array"],
        rank: int,
    ) -> Self: ...
    def take(
        self, ts: float, *, contents: bool
    ) -> tuple[bytes | None, bytes | None, tuple[int, int, int], bool]:
        """Take the events since the last call.

        Args:
            ts: time of the batches, in seconds since 1970.
            contents: whether to encode the contents too, as a batch that clears a reader first.

        Returns:
            The events as a msgpack batch, None without events. The contents, if requested or if
            events were lost. Numbers of blocks stored, removed and withheld. Whether events were
            lost.

        Raises:
            ClosedError: the manager is closed.
        """

    def close(self) -> None:
        """Allow a new encoder for the manager."""

@final
class HintReply:
    """Result of a hint.

    Attributes:
        answer: "accepted": in force for all its blocks. "clipped": in force for some of its blocks.
            "deferred": waits for blocks that are not cached. "rejected": changes nothing for any
            cached block.
        blocks: number of blocks with the hint in force.
        not_applied: number of its blocks without the hint in force.
        code: the last reason for an incomplete answer, for programs. "accepted": it is complete.
            "absent": its path, session, lease or owner has no such block. "waiting": blocks are not
            cached yet. "share": a tier retains its maximum number of blocks. "full": the scope has
            its maximum number of pending hints. "crowded": the maximum number of loads is in flight
            to the tier. "late": loads would arrive after the deadline. "no-room": the tier has no
            room. "incomplete": no tier has all layers for the load. "in-use": the blocks are in
            use, or no tier can take them.
        reason: the reason for an incomplete answer, for people. Empty if accepted. The wording may
            change.
    """

    @property
    def answer(self) -> Literal["accepted", "clipped", "deferred", "rejected"]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def not_applied(self) -> int: ...
    @property
    def code(
        self,
    ) -> Literal[
        "accepted",
        "absent",
        "waiting",
        "share",
        "full",
        "crowded",
        "late",
        "no-room",
        "incomplete",
        "in-use",
    ]: ...
    @property
    def reason(self) -> str: ...

@final
class Unpriced:
    """Blocks without a cost. Every array has an entry per block.

    Attributes:
        id: handles of the blocks, `uint64`.
        context: tokens before each block, `uint64`.
        index: each block's index in its sequence, from 0, `uint32`.
        uses: number of uses of each block, `uint32`.
        session_blocks: blocks of its session, or up to its own end without a session, `uint32`.
    """

    @property
    def id(self) -> NDArray[np.uint64]: ...
    @property
    def context(self) -> NDArray[np.uint64]: ...
    @property
    def index(self) -> NDArray[np.uint32]: ...
    @property
    def uses(self) -> NDArray[np.uint32]: ...
    @property
    def session_blocks(self) -> NDArray[np.uint32]: ...
    def __len__(self) -> int: ...

@final
class Event:
    """Departure of some layers of a block from a tier, or their arrival.

    Attributes:
        kind: "removed" for layers that left, "stored" for layers that arrived.
        at: when, in nanoseconds.
        block: handle of the block.
        layer_lo: first layer.
        layer_hi: the last layer plus 1.
        tier: index of the tier.
        group: group of layers, if groups are kept apart. Layers count within the group.
        reason: of an eviction: "clean", a copy on a different tier exists. "demoted", the block is
            written to the next tier. "dropped", it was the last copy. None in residency events.
        cause: cause of the eviction, as listed by `TierStats`. None in residency events.
        to: index of the destination tier. None in residency events.
        idle: nanoseconds since its last use. None in residency events.
        number: position among all residency events, from 0 on: a gap shows that some were
            overwritten. None in evictions, as are all fields below.
        key: content key of the block, 32 bytes, equal in every process.
        parent: content key of the block before it. The key of its scope for a first block.
        first: whether it is the first block of a sequence.
        tokens: tokens of a stored block. None for a removed block.
    """

    @property
    def kind(self) -> Literal["stored", "removed"]: ...
    @property
    def at(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def layer_lo(self) -> int: ...
    @property
    def layer_hi(self) -> int: ...
    @property
    def tier(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def reason(self) -> _Reason | None: ...
    @property
    def cause(self) -> _Cause | None: ...
    @property
    def to(self) -> int | None: ...
    @property
    def idle(self) -> int | None: ...
    @property
    def number(self) -> int | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def first(self) -> bool | None: ...
    @property
    def tokens(self) -> list[int] | None: ...

@final
class Eviction:
    """Entry of the eviction log: why some layers of a block left a tier.

    Attributes:
        at: when, in nanoseconds.
        block: handle of the block.
        position: its position in its sequence, in blocks.
        tenant: the salt of its tenant.
        lora: the name of its adapter.
        tier: index of the source tier.
        to: index of the destination tier, or None.
        layers: the evicted layers: first, and last plus 1.
        cause: cause of the eviction, as listed by `TierStats`.
        reason: "clean", a copy on a different tier exists. "demoted", the block is written to
            the next tier. "dropped", it was the last copy.
        uses: number of its uses.
        idle: nanoseconds since its last use.
        cost: the product of all terms.
        terms: the terms and weights of `Explanation`, under the policy of the tier.
        value: retention value: cost per second of idle time, infinite at zero idle time.
        next_value: value of the next victim, or None. It may be lower if the block before this
            block could not leave until now.
    """

    @property
    def at(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def tenant(self) -> bytes: ...
    @property
    def lora(self) -> str: ...
    @property
    def tier(self) -> int: ...
    @property
    def to(self) -> int | None: ...
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def cause(self) -> _Cause: ...
    @property
    def reason(self) -> _Reason: ...
    @property
    def uses(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def terms(self) -> dict[Literal["base", "uses", "layer", "position"], float]: ...
    @property
    def value(self) -> float: ...
    @property
    def next_value(self) -> float | None: ...

@final
class Histogram:
    """Times in nanoseconds, counted by their length.

    Classes are at most a sixteenth wide, so quantiles are at most a sixteenth too long. Times above
    13 days count as 13 days. `sum` is exact.

    Attributes:
        count: number of recorded times.
        sum: their sum, in nanoseconds.
    """

    @property
    def count(self) -> int: ...
    @property
    def sum(self) -> int: ...
    def quantile(self, share: float) -> int:
        """Return the shortest time not exceeded by a share of all times, in ns, or 0.

        Args:
            share: 0 to 1, as 0.99 for the 99th percentile.

        Raises:
            ConfigError: a share below 0 or above 1.
        """

    def up_to(self, bounds: Iterable[SupportsIndex]) -> list[int]:
        """Return the number of times up to each bound.

        The class that contains a bound counts as below it.

        Args:
            bounds: nanoseconds, ascending.

        Raises:
            ConfigError: a bound at or below the bound before it.
        """

    def since(self, before: Histogram) -> Histogram:
        """Return the times recorded after `before` was taken.

        Raises:
            ConfigError: `before` is not an earlier state of this histogram.
        """

    def as_dict(self) -> dict[str, int]:
        """Return its `count`, `sum`, `p50`, `p90`, `p99` and `max`, in nanoseconds."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class GroupStats:
    """Slots of a group of layers on a tier."""

    @property
    def held(self) -> int:
        """Slots of blocks and states held by a resume point or a lease.

        In the first group, all slots in use.
        """

    @property
    def released(self) -> int:
        """Released slots. Their contents are found until they are reused, before any victim."""

@final
class LaneStats:
    """Counters of a lane.

    Attributes:
        busy_ns: nanoseconds of transmissions, as reported by `add_lane_busy` or an `Executor`.
            Independent of the declared speed.
        predicted_ns: nanoseconds of its transmissions at its declared speed, latency included.
        bytes: bytes given to it.
        free_at: time at which its queue is empty, in nanoseconds.
    """

    @property
    def busy_ns(self) -> int: ...
    @property
    def predicted_ns(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def free_at(self) -> int: ...

@final
class TierStats:
    """Counters of a tier since the manager was made, and its present contents.

    An eviction is counted when it is decided. With layer slots each evicted range of layers counts.
    Causes: "demand", the room was needed at once. "ahead", the room was needed for a block to
    write down before its slot is needed. "suspended", the lease was suspended. "failed", the copy
    was unreadable or after a lost block. "cleared", by `mark`. "reset". "hinted", by a `Demote`
    hint.

    Attributes:
        kind: which tier.
        policy: its eviction policy.
        slots: all slots.
        free: slots writable at once. On a tier owned by the engine always all slots, since only the
            engine knows the used slots.
        coming: slots without an owner that a store still reads.
        evictable: possible victims now.
        copies: blocks here with all or some of their layers, without arriving blocks.
        clean: copies droppable at once without a loss: their layers are also on a lower tier or, on
            the last tier, on a higher tier.
        dirty: all remaining copies.
        retained: copies retained by a hint.
        hits: blocks found here by requests. A block loaded in part counts on the source tier of the
            load. A block recomputed in part is no hit. A block loaded by `Lease.load` counts when
            all of it is in flight.
        misses: full blocks requested and found neither here nor on a faster tier. Blocks left out
            by a request with `load="none"` count when its lease ends.
        tokens_hit: tokens found here by requests.
        evicted: evictions.
        evictions: evictions by cause.
        groups: slots of each group of layers, in the model's order, if the manager keeps groups
            apart. Otherwise empty.
        evicted_clean: instant evictions: a different tier has a copy.
        evicted_dirty: evictions with a write first.
        dropped: evictions of last copies.
        demoted: stores of a block begun into this tier.
        promoted: loads of a block begun out of this tier.
        bytes_freed: bytes freed by evictions.
        bytes_read: bytes read from here by moves.
        bytes_written: bytes written to here by moves.
        moves: moves into this tier.
        failed: failed moves into this tier.
        stores_dropped: on tier `remote`: blocks evicted from the tier above before a worker began
            to store them here.
        move_ns: nanoseconds from begin to end, summed over moves into this tier.
        compared: number of comparisons by `audit` of the next victim with the exact least value.
        regrets: number of comparisons with a victim above the exact least value: by at most
            `epsilon`, so none at 0.
        hit_age: times since the last use, of blocks found here by requests.
        evict_age: times since the last use, of evicted copies.
        load_time: times from `moves` to success, of loads that read from here. They start at the
            latest time seen by the manager.
        store_time: the same for stores that wrote to here.
        copy_time: the same for copies within this tier.
    """

    @property
    def kind(self) -> _Kind: ...
    @property
    def policy(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def coming(self) -> int: ...
    @property
    def evictable(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def clean(self) -> int: ...
    @property
    def dirty(self) -> int: ...
    @property
    def retained(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def tokens_hit(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def evictions(self) -> Mapping[_Cause, int]: ...
    @property
    def groups(self) -> list[GroupStats]: ...
    @property
    def evicted_clean(self) -> int: ...
    @property
    def evicted_dirty(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def demoted(self) -> int: ...
    @property
    def promoted(self) -> int: ...
    @property
    def bytes_freed(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def moves(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def stores_dropped(self) -> int: ...
    @property
    def move_ns(self) -> int: ...
    @property
    def compared(self) -> int: ...
    @property
    def regrets(self) -> int: ...
    @property
    def hit_age(self) -> Histogram: ...
    @property
    def evict_age(self) -> Histogram: ...
    @property
    def load_time(self) -> Histogram: ...
    @property
    def store_time(self) -> Histogram: ...
    @property
    def copy_time(self) -> Histogram: ...

@final
class Stats:
    """All counters of a manager at a moment. They only grow, and `reset` leaves them.

    Attributes:
        tiers: counters per tier, fastest first.
        lanes: counters per lane, by name.
        requests: requests with a lease. Resumed requests do not count again.
        refused: requests without room.
        blocks_wanted: full blocks of the prompts of `requests`: the sum of the hits on all tiers
            and the misses of the last tier.
        tokens_wanted: tokens of the same prompts.
        inserted: blocks added to the trie by a commit.
        duplicates: blocks computed by a lease after a different lease committed them.
        blocks: blocks in the trie now.
        leases: leases held now.
        moves: unfinished moves.
        queued: moves not yet taken.
        failed_lost: rows of `failed` overwritten before they were taken.
        clamped: calls with a time below the latest time.
        doubted: calls with a time more than a day beyond the latest time, served at the latest
            time. The next call is believed if it has about the same time.
        now: the latest time seen, in nanoseconds.
    """

    @property
    def tiers(self) -> Mapping[_Kind, TierStats]: ...
    @property
    def lanes(self) -> Mapping[str, LaneStats]: ...
    @property
    def requests(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def blocks_wanted(self) -> int: ...
    @property
    def tokens_wanted(self) -> int: ...
    @property
    def inserted(self) -> int: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def moves(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def failed_lost(self) -> int: ...
    @property
    def clamped(self) -> int: ...
    @property
    def doubted(self) -> int: ...
    @property
    def now(self) -> int: ...
    def since(self, before: Stats) -> Stats:
        """Return the statistics since `before`: counters and histograms are differences.

        Present contents and `now` are taken from this object. A rate is a difference divided by
        `(after.now - before.now) / 1e9` seconds.

        Raises:
            ConfigError: `before` is not an earlier state of the same manager.
        """

    def as_dict(self) -> dict[str, Any]:
        """Return dictionaries of numbers for JSON, histograms as `Histogram.as_dict`."""

@final
class ValueFormat:
    """Names and checksums of one rank's blocks in a shared store.

    A value is a header of `header_bytes`, then the layers at fixed offsets. Checksums are XXH3-128,
    or keyed BLAKE3-128 with a secret. Calls leave the interpreter to other threads while they hash.

    Attributes:
        header_bytes: bytes of a header, in whole pages.
        value_bytes: bytes of a value.
    """

    def __new__(
        cls,
        *,
        layers: int,
        layer_bytes: int,
        block_tokens: int,
        meaning: bytes,
        secret: bytes | None = None,
    ) -> Self: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def value_bytes(self) -> int: ...
    def layer_at(self, layer: int) -> int:
        """Return the offset of a layer in a value."""

    def names(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the names `(blocks, 32)` of blocks by their content keys `(blocks, 32)`."""

    def headers(
        self, blocks: Sequence[tuple[bytes, bytes, NDArray[np.uint8]]]
    ) -> list[tuple[bytes, str | None]]:
        """Return the headers of blocks, given as key, label and all layers.

        Returns:
            A header and None for each, or no bytes and the reason.
        """

    def verify(
        self,
        blocks: Sequence[tuple[bytes, NDArray[np.uint8], tuple[int, int], NDArray[np.uint8]]],
    ) -> list[str | None]:
        """Verify blocks after reading, given as key, header, layers and memory.

        Returns:
            The difference for each block, or None.
        """

@final
class ValueFolder:
    """Values in the files of a folder, for `kvtrie.tiers.remote.folder`.

    Calls leave the interpreter to other threads. Times are remaining nanoseconds. Results are
    pairs of an outcome and a reason.
    """

    def __new__(
        cls,
        folder: str | PathLike[str],
        *,
        header_bytes: int,
        value_bytes: int,
        ttl: int | None = None,
        io: str = "direct",
    ) -> Self: ...
    @staticmethod
    def collect(
        folder: str | PathLike[str], *, expired: int | None, stale: int
    ) -> tuple[int, int, int, int]:
        """Remove values last refreshed before `expired` and staging files older than `stale`.

        Args:
            folder: a folder of values, possibly in use.
            expired: nanoseconds of the wall clock. None removes no value.
            stale: nanoseconds of the wall clock.

        Returns:
            Values and staging files removed, the bytes of both, and values left.

        Raises:
            ConfigError: the folder is not a folder of values.
        """

    def sweep(self, before: int) -> int:
        """Remove and count staging files older than `before`, in ns of the wall clock."""

    def path(self, name: bytes) -> Path:
        """Return the file of a value."""

    def exists_many(self, names: Sequence[bytes], left: int) -> list[tuple[str, str]]:
        """Return for each name whether its value exists."""

    def get_many(
        self,
        values: Sequence[tuple[bytes, NDArray[np.uint8], int, NDArray[np.uint8]]],
        left: int,
    ) -> list[tuple[str, str]]:
        """Read values, given as name, memory of the header, offset and memory of the layers."""

    def put_many(
        self, values: Sequence[tuple[bytes, bytes, NDArray[np.uint8]]], left: int
    ) -> list[tuple[str, str]]:
        """Write absent values, given as name, header and memory."""

    def remove_many(self, names: Sequence[bytes]) -> list[tuple[str, str]]:
        """Remove values."""

@final
class Simulation:
    """Machines that serve a trace on the trace's clock, each with its manager.

    Nothing is copied or computed: an executor inside waits for the duration of the copies. Equal
    arguments and requests give equal results. `kvtrie.sim.run` makes one from a settings file.
    """

    def __new__(
        cls,
        model: ModelShape,
        tiers: Iterable[Tier],
        *,
        price: tuple[int, int]
        | Sequence[tuple[int, int]]
        | tuple[
            int,
            tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]],
            tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]],
            int,
        ],
        machines: int | Sequence[tuple[Sequence[Tier], object, Cost | str]] | None = 1,
        block_tokens: int = 16,
        token_weight: int = 1,
        policy: str = "learned",
        cost: Cost | Literal["default", "seed"] = "default",
        structure: Literal["leaf-only", "holes"] = "leaf-only",
        drop_order: Literal["shallow", "seed"] = "shallow",
        reuse: bool = True,
        epsilon: float = 0.015625,
        load: Literal["plan", "all", "none"] = "all",
        keep: int = 1,
        wait: Literal["all", "layer", "step"] = "all",
        router: Literal["round-robin", "least-loaded", "hash"]
        | tuple[Literal["locality"], int]
        | tuple[Literal["score"], int, int] = "round-robin",
        transfer: Literal["executor", "predicted"] = "executor",
        moves_per_job: int = 64,
        peers: Lane | None = None,
        engine: Literal["serial", "continuous", "disaggregated"] = "serial",
        token_budget: int = 2048,
        max_running: int = 256,
        token_by_token: bool = False,
        answers: Literal["released", "cached"] = "released",
        prefill: int = 1,
        network: Lane | None = None,
        directory_ns: int | None = None,
        prefetch: Literal["never", "arrival"] = "never",
        clients: int | None = None,
        logged: bool = False,
        objective: Literal["cost", "balanced", "hits"] = "cost",
        resume: ResumePoints | None = None,
        remote: Literal["all", "local"] | None = None,
        reports: tuple[Literal["progress", "prefetch", "prefetch-now"], int, bool] = (
            "progress",
            0,
            False,
        ),
    ) -> Self:
        """Make machines without a block.

        Args:
            model: as for `BlockManager`, as are `tiers`, `block_tokens`, `token_weight`, `policy`,
                `cost`, `structure`, `drop_order`, `reuse`, `epsilon`, `objective` and `resume`.
                Machines with peers, a network or a shared store do not take `resume`.
            tiers: of each machine, fastest first.
            price: cost of computing a token, in 2**-32 ns: `(base, slope)`, the slope per token of
                context, or ascending pairs `(context, price)`, linear between them. Or `(base,
                prefill, decode, request)` in ns: of a step without tokens, beyond it `(contexts,
                counts, rows)` by tokens of a prefill and by decoding requests, and of a request
                outside of steps.
            machines: number of machines (1), or `(tiers, price, cost)` of each, with tiers of the
                same kinds as `tiers`. A tier 'remote' needs a single machine, without `remote`.
            block_tokens: tokens of a block.
            token_weight: real tokens per given token.
            policy: eviction policy.
            cost: the managers' model of the price.
            structure: whether blocks inside a sequence may leave.
            drop_order: the layers of a last copy to evict first.
            reuse: whether policies count uses.
            epsilon: width of the classes of costs.
            objective: what policies with values save.
            resume: how managers keep groups of layers apart. None keeps all layers of all tokens.
            load: as for `BlockManager.acquire`.
            keep: number of real tokens at a prompt's end to compute in any case.
            wait: "all": a prefill joins a step once all its loads have ended. "layer": each layer
                waits for its own loads. "step": the prefill's step waits for all loads.
            router: a request's machine: each machine in turn, the machine with the fewest requests,
                or a fixed machine per session (without a session, per first block). `("locality",
                ratio)` chooses the machine with the most of the prompt, among machines with at most
                `ratio` (in 2**-32) times the fewest requests, this request counted. `("score",
                hit_weight, load_weight)` chooses the lowest weighted sum of the prompt's tokens to
                compute and the tokens of unfinished prompts on the machine. Ties go to the least
                loaded machine, then to the lowest number.
            transfer: whether moves take the executor's time, or end at the manager's prediction, as
                in `kvtrie.sim.replay`.
            moves_per_job: maximum number of moves of a transmission.
            prefetch: whether a request's blocks are loaded from its arrival, like a hinted
                prefetch, or from its begin.
            peers: the lane between two machines, to fetch blocks from a peer's host or disk. Each
                ordered pair has a lane. With `shares` all lanes are one queue, shared with lanes of
                tiers under the same name. None fetches nothing.
            engine: how requests are computed: sequentially, or all together in steps, or in steps
                with prompts on the first machines and answers on the remaining machines.
            token_budget: maximum number of tokens of a step of the continuous engine.
            max_running: maximum number of requests with blocks there, at most the budget.
            token_by_token: whether each of its steps with decodes only is a separate event.
            answers: whether the full blocks of an answer stay cached there after the request. No
                later prompt matches them.
            prefill: number of machines that compute prompts for a disaggregated engine.
            network: the lane between two machines for its hand-over of requests, if `peers` is
                None.
            directory_ns: delay of the residency events by which routers and peers learn the
                location of blocks. None asks every manager each time.
            clients: number of clients, each with a single conversation at a time. None if arrivals
                do not wait for answers.
            logged: keep all calls of managers for `log`.
            remote: the last tier, of kind 'remote', is a store shared by all machines with room for
                its `blocks`. A machine finds there "all" blocks, blocks of peers after the latency
                of `read`, or "local", only its own blocks. Lanes with `shares` are one queue of all
                machines. None: a tier 'remote' belongs to a single machine.
            reports: the hint for a tool's report, the destination tier of the session's blocks, and
                whether they go to the last tier when the tool begins.

        Raises:
            ConfigError: contradictory settings.
        """

    @staticmethod
    def over(
        manager: BlockManager, *, load: Literal["plan", "all", "none"] = "all", running: int = 1
    ) -> Simulation:
        """Make a machine from a manager, with an engine that computes in no time.

        Moves end at the manager's prediction.

        Args:
            manager: a manager without moves under way.
            load: as for `BlockManager.acquire`.
            running: number of requests with blocks at a time. All earlier requests have ended.
        """

    def run(
        self,
        requests: Iterable[
            tuple[int, _Tokens, int, int, str | None]
            | tuple[int, _Tokens, int, int, str | None, Mapping[str, object]]
        ],
        on_record: Callable[
            [
                tuple[
                    int,
                    int,
                    int,
                    int | None,
                    int | None,
                    list[int],
                    int,
                    tuple[int, int, list[int]],
                    tuple[int, int],
                    list[int],
                    int,
                    int,
                ]
            ],
            object,
        ],
        decide: Callable[
            [tuple[int, int, tuple[int, int, int, int], list[tuple[int, int, int, int]], int]],
            object,
        ]
        | None = None,
        *,
        best: int = 0,
    ) -> None:
        """Play requests to their end, while other threads run Python.

        Args:
            requests: `(arrival_ns, tokens, input_tokens, output_tokens, session)`, in order of
                arrival. An optional sixth element is a mapping, of the type
                `kvtrie.sim.readers.rows.OptionalFields`: `last` and `tool` become hints to the
                request's machine. With `clients`,
                conversation after conversation: the consecutive requests of a session, or a single
                request without a session. Then `arrival_ns` is the time to think between the
                previous answer, or 0, and the request.
            on_record: called with each record, in order: `(id, machine, arrival_ns, first_token_ns,
                end_ns, tokens found per tier, tokens found on a peer, tokens computed, ns in the
                queue and waited for copies, saved ns of computing per tier and last for the peer,
                times suspended, tokens of the answer)`. The times of a request without room are
                None, and it has no tiers.
            decide: called with each decision of the router, in order: `(id, arrival_ns, chosen,
                others, regret_ns)`. A machine is `(number, cached tokens of the prompt, tokens of
                unfinished prompts there, cost_ns)`, by exact knowledge. Its cost is the estimated
                time to the first token: to compute the missing tokens, after the tokens of the
                unfinished requests there. The regret is the cost of the chosen machine less the
                least cost.
            best: number of further machines reported, the best machines first.

        Raises:
            ConfigError: a request with an arrival before the previous request's.
        """

    @property
    def now(self) -> int:
        """The time of the last event, in nanoseconds."""

    def tiers(self) -> list[tuple[int, int, int, int, int]]:
        """Return blocks and tokens hit, and clean, demoted and dropped evictions, per tier."""

    def prefetched_byte_s(self) -> list[int]:
        """Return the byte-seconds of prefetched blocks before their first use, per tier in all.

        A block waits from its arrival on. On the first tier nothing is counted.
        """

    def lanes(self) -> dict[str, tuple[int, int, int]]:
        """Return bytes, busy ns, and ns waited for earlier transmissions, of each lane, in all."""

    def watch(self, *, spans: bool = False, sample_ns: int = 0) -> None:
        """Record the spans and samples for pictures from now on.

        Args:
            spans: each step and transmission.
            sample_ns: nanoseconds between samples of all tiers, but at most one sample between two
                events. 0 takes none.
        """

    def spans(self) -> list[tuple[int, str | None, int, int, int]]:
        """Return `(machine, lane, start_ns, end_ns, bytes)` by machine, lane None for a step.

        A lane named `peers` carries towards its machine.
        """

    def samples(self) -> list[tuple[int, int, list[int]]]:
        """Return `(at_ns, machine, blocks resident per tier)`, before the events of that time."""

    def log(self, machine: int) -> list[tuple[Any, ...]]:
        """Return the calls of a machine's manager, in order, each with its name first.

        `("acquire", tokens, keep, reserve, layerwise, session, lease, now)`, with lease 0 for a
        NoSpaceError. `("moves", rows)`, a row being id, kind, lease, src, dst, src_slot, dst_slot,
        layer_lo, layer_hi, after. `("complete", ids, now)`. `("commit", lease, tokens, now)`.
        `("release", lease, now)`. `("mark", tokens, tier, skip, first, ready, fits, now)`, with
        `fits` False for a NoSpaceError. `("pin", blocks, tier, pin, now)`. `("unpin", pin, now)`.
        `("prefetch", tokens, now)`, a hint.
        """

@final
class Transmission:
    """Times of a transmission on a lane: layer `i` is there at `first + i * per_layer`.

    Attributes:
        end: arrival of the last layer, in nanoseconds.
        first: arrival of the first layer, in nanoseconds.
        per_layer: nanoseconds between two layers.
    """

    @property
    def end(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def per_layer(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
