# ruff: noqa: PYI021 - native classes have no source that could carry these docstrings
"""Native classes of kvtrie; import them from `kvtrie`.

Times are integer nanoseconds on the caller's monotone clock, below 2**63. A time below the latest
one seen counts as that one (`Stats.clamped`), and so does a time more than a day beyond it until
the next call confirms it (`Stats.doubted`). A tier is named by its index in the manager's list or
by its kind. A block is named by its handle, a `uint64` that is valid until the block is removed, or
by a `MatchedBlock`.

Every call can raise, in addition to the errors it lists: `ConfigError` for a wrong argument (its
message has the numbers), `ClosedError` once the manager is closed, `InvariantError` once it is
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
    """Bytes of a page of a tier that groups of layers share.

    Args:
        slots: bytes of a slot of each group.

    Raises:
        ConfigError: a slot without bytes, or above 2^56 bytes.
    """

@final
class HashLines:
    """Reader of the lines of a trace of block hashes, where nothing is unusual.

    Equal hashes have equal ids, and distinct ones distinct ids.

    Args:
        most: ids of a line.
        own: hashes below are ids as they are; others are numbered from there as they appear.
        room: ids end before.
        hash_tokens: tokens of a hash, against which lines are checked; None checks none.
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
            fields that are not read, (request_id, wait_for, tool_wait_ms))`; None for a line that
            cannot be, or that `kvtrie.sim.readers.hashes` has to look at: it names the fault, and
            reads the same.
        """

    def ids(self, hashes: Sequence[int]) -> NDArray[np.uint32]:
        """Return the ids of hashes of 64 bits.

        Raises:
            ConfigError: no id is left.
        """

def locality(candidates: list[tuple[int, int]], ratio: int) -> int:
    """Return the candidate that the simulator's router `locality` chooses.

    Args:
        candidates: `(load, hit)` of each machine, requests and tokens; at least one.
        ratio: in units of 2**-32, at least 1.
    """

@type_check_only
class _Array(Protocol):
    """An object that numpy reads as an array, such as a CPU tensor."""

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
    """Decides what is cached where, what to keep, what to move and what to recompute.

    It never touches bytes: `moves` says what to copy, `complete` reports that it is done. All
    methods may be called from any thread. Long calls (`lookup_many` and `acquire` of more than
    65 536 tokens, `hint`, `index`, `load_index`, `flush`, `snapshot`, `audit`) let other threads
    run.
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
            model: the shape of the model whose KV is kept.
            tiers: one to four tiers, fastest first: gpu, host, disk, remote, each at most once.
            block_tokens: tokens of one block.
            policy: which copies leave first, one of `policies()`; a tier may have its own. The
                default learns how soon each kind of block comes back.
            cost: cost of computing a token again, relative to one without context. With "python"
                `set_costs` gives it per block; until then the default applies.
            structure: "leaf-only" keeps every cached prefix whole; "holes" lets any block go and
                has the engine recompute it. A scope may have its own.
            drop_order: for operators: layers of a last copy that leave first: the first ones with
                "shallow", the last ones with "seed".
            token_weight: real tokens for each given one; above 1 for traces of block hashes.
            machine: for operators: this machine's number, a label of metrics.
            ranks: tensor-parallel ranks, 1 to 64; a move is done when all have reported it.
            events: how many events are remembered for `take_events`.
            events_of: which events: "evictions" with reason and cause, or by "residency" all layers
                that arrive on a tier or leave it, with content keys, for a directory of several
                machines. These cost a hash per block.
            eviction_log: how many evictions are kept for `evictions`, up to 1 048 576; each costs
                about 200 bytes, and an eviction about a microsecond. 0 keeps none.
            reuse: for operators: whether policies that may count uses do: `retention` multiplies
                its cost by them, and remembers them of blocks that are gone, in 8 bytes per block
                of the tiers.
            epsilon: for operators: policies of the form cost / idle round costs down to classes
                `1 + epsilon` apart, 0 to 1; a victim's value is at most that factor above the
                smallest one, by default 1/64. With 0 victims are exact.
            objective: what policies by value save: the "cost" of computing blocks again, or "hits",
                where every block is worth the same and prices are not read. Every tier's policy
                must have values then: `learned`, `retention`, `flat`, `weighted`.
            resume: which borders stay resumable in a model of several groups of layers. Each
                group keeps only what resume points and leases need then, on gpu, host and disk;
                None keeps all tokens of all layers, as does one group of full attention.
            explain: whether evicted blocks are remembered for `explain_miss` under a policy that
                does not remember them, in 8 bytes per block of the tiers; decides nothing.
            secret: keys the hashes of tenants that have produced a block; scopes with
                `share_after` need one if a tier outlives the manager.

        Raises:
            ConfigError: settings that contradict each other, or a disk with a path or a remote
                tier for a model without a fingerprint.
        """

    @property
    def model(self) -> ModelShape:
        """The shape of the model whose KV is kept."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""

    @property
    def machine(self) -> int:
        """This machine's number."""

    @property
    def generation(self) -> int:
        """Counter that increments whenever the result of a lookup may have changed.

        While it is the same, a lookup of the same tokens in the same scope gives the same blocks
        and copies, except for predicted times; a scheduler need not repeat it for a waiting
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
        """The longest usable prefix of a sequence; pins and refreshes nothing.

        Every block of it is resident or arriving on some tier or, in a scope with holes,
        recomputable.

        Args:
            tokens: the sequence.
            now: the time.
            scope: the scope of its blocks.
            keep: minimum number of tokens at the end that stay uncovered.

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
        """`lookup` of many sequences in one call, all of the same state.

        One conversion, one lock; with more than 65 536 tokens in all other threads run during it.

        Args:
            tokens: the sequences.
            now: the time.
            scope: the scope of their blocks.
            keep: minimum number of tokens at the end of each that stay uncovered.

        Returns:
            One match per sequence, in their order.

        Raises:
            ConfigError: a token is out of range, or the scope was first used with another
                structure.
        """

    def keys(self, tokens: _Tokens, *, scope: Scope | None = None) -> NDArray[np.uint8]:
        """The content keys of the full blocks of a sequence, cached or not.

        A key is a hash of the model's fingerprint, the scope and all tokens and digests up to the
        end of the block: equal in every process with the same fingerprint and block size.

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
        """Which full blocks of a sequence each group of layers has on the tiers above one.

        Args:
            tokens: the sequence.
            tier: the tier below them, as a store that is asked for the rest.
            scope: the scope of its blocks.

        Returns:
            For each group, for each block that the manager knows, whether a tier above has it or
            expects it; after those none has.
        """

    def longest_resume(self, parts: list[list[bool]], most: int) -> int:
        """The longest border at which every group after the first has what a resume needs.

        Args:
            parts: for each group after the first, which blocks it has.
            most: the last border that counts, in blocks, all of which the first group has.

        Raises:
            ConfigError: another number of groups, or of blocks fewer than `most`.
        """

    def resume_needs(self, border: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Blocks that a resume needs of each group after the first.

        Args:
            border: blocks before it.

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
        """Look a prompt up, pin what its plan reuses or loads, and make room, or do nothing.

        Args:
            tokens: the prompt.
            now: the time.
            scope: the scope of its blocks.
            session: the conversation it belongs to; its name counts within the scope.
            session_blocks: number of blocks it will have, for policies that rank a block by its
                place in its session; at least the number it has. None keeps the last value.
            keep: number of tokens at the end that stay to be computed.
            reserve: number of tokens after the prompt's end to make room for; room for unmatched
                tokens is always included.
            load: "plan" loads or computes, whichever is ready sooner; "all" loads all it can, and
                in a leaf-only scope the match ends where it cannot; "none" loads nothing until
                `Lease.load`.
            deadline: loads that would be ready later are not planned.
            layerwise: whether the engine computes a layer while the next ones are loaded, as
                `LayerwiseEngine` does; otherwise it waits until all layers are there. Plans count
                with it, those of `Lease.resume` too.

        Raises:
            NoSpaceError: a tier cannot hold it.
            ConfigError: an empty prompt, or the scope was first used with another structure.
        """

    def lease(self, lease_id: int) -> Lease:
        """A lease that is held, by its id.

        Raises:
            ClosedError: it is released, or never was.
        """

    def moves(self, limit: int | None = None, *, shared: int | None = None) -> Moves:
        """Take moves to carry out, each exactly once, in topological order.

        A move must not start on any rank before the one that it names as `after` has been completed
        well on all of them; if that one failed, the move has failed with it and is not to be
        carried out.

        A store to tier `remote` counts as begun once it is taken: its source is not evicted until
        it has ended. Until then eviction takes the source like any other copy and drops the store,
        so that nothing waits for a shared store. Take only as many as workers can begin.

        Args:
            limit: maximum number; None takes all.
            shared: the most blocks whose stores to tier `remote` begin by this call, the oldest
                first; None begins all.
        """

    @property
    def shared_stores(self) -> tuple[int, int]:
        """Blocks that wait to be stored on tier `remote`, and those dropped so far.

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
        """Take a report about moves: their copies count from then on.

        Reporting a move again changes nothing.

        Args:
            ids: the moves.
            now: the time.
            ok: whether their bytes are there. If not, sources that could not be read are avoided,
                leases that awaited them are planned again, and `failed` names the tokens.
            layers_done: number of each move's layers that have arrived, counted from its first;
                None means all.
            rank: the tensor-parallel rank that reports.
            error: why they failed.
            hung: they failed but still run, so their slots stay out of use until they are
                reported once more, then with `ok=False, hung=False`.
            cancelled: they failed and never started: neither source nor destination is to blame.

        Returns:
            How many moves have ended well by this report, on all ranks.

        Raises:
            ConfigError: a move that was never handed out, or a report that contradicts an earlier
                one.
        """

    def failed(self) -> list[Failed]:
        """Take the tokens that will not be where a plan placed them, since the last call.

        The plan, `matched` and `slots` of every lease named here are to be read again. The latest
        4096 rows are kept; older ones are counted in `Stats.failed_lost`. A lease's own `plan` is
        true whether its rows are read or not.
        """

    def predict(self, ids: _Ids, *, now: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Predict the times at which the first and the last layer of moves arrive.

        Args:
            ids: the moves.
            now: the time.

        Returns:
            Two arrays of nanoseconds, `uint64[n]`; a move that has ended is ready now.

        Raises:
            ConfigError: a move that was never handed out.
        """

    def transmit(
        self, lane: str, tokens: int, *, now: int, layers: int | None = None
    ) -> Transmission:
        """Put a transmission into a lane's queue, without a move: for simulators.

        Args:
            lane: the lane's name.
            tokens: number of tokens whose KV is sent.
            now: the time; the transmission starts after everything in the lane's queue.
            layers: number of layers of it; None means all.

        Returns:
            Its predicted times: `latency_ns + bytes / bytes_per_s` after the queue.

        Raises:
            ConfigError: there is no lane of that name, or the model has fewer layers.
        """

    def saw_lane(self, lane: str, *, busy_ns: int) -> None:
        """Count time in which a lane was busy, for `LaneStats.busy_ns`.

        For engines that copy by themselves; an `Executor` reports it.

        Args:
            lane: its name.
            busy_ns: nanoseconds.

        Raises:
            ConfigError: there is no lane of that name.
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
        """Set or clear the presence of a sequence's full blocks on a tier, without a move.

        A slot that is taken for a block may still be read by a move that began earlier: write to
        its memory once that move has ended.

        Of `ready`, `first` and `per_layer`, two give the third by
        `first + (layers - 1) * per_layer == ready`.

        Args:
            tokens: the sequence.
            tier: where.
            present: whether they are there. Setting makes room, brings the layers that the tier
                lacks, and makes good a copy that could not be read.
            now: the time.
            ready: when all layers are there; None means now. Until then the copy is arriving.
            first: when the first layer is there.
            per_layer: nanoseconds between two layers.
            scope: whose blocks.
            skip: number of blocks at the front that stay as they are; to set presence they must be
                cached.
            group: the only group of layers that is marked, where groups are kept apart; None is
                all, and of groups after the first what a resume at the end of the sequence needs.

        Returns:
            Handles of the blocks that are or were there, `uint64[n]`.

        Raises:
            NoSpaceError: the tier cannot hold them.
            ConfigError: times that contradict each other; a block to clear that is leased, on the
                move, or needed by blocks after it; a block to be there that a failed move still
                writes, or of which only a part is on its way; a tier whose slots the engine owns.
        """

    def evict(
        self, count: int, tier: _Tier = 0, *, now: int, stay: _Ids = (), group: int = 0
    ) -> NDArray[np.uint64]:
        """Evict blocks in the order of the tier's policy, all or none.

        For an engine that stores the bytes and asks which of its blocks leave. Of a group of layers
        after the first, windows or states leave and their blocks stay: first those that no resume
        point needs, then those of the points that leave first. What leases and pins hold stays.

        Args:
            count: number of blocks.
            tier: the tier that they leave.
            now: the time.
            stay: handles of blocks that stay, in a leaf-only scope with all blocks before them.
                Handles of blocks that are gone are ignored. Empty with a group after the first.
            group: group of layers, where groups are kept apart.

        Returns:
            Handles of the blocks that left, `uint64[n]`; more than `count` if one was the last copy
            of a block that others follow on other tiers: in a leaf-only scope those leave too. Of a
            group after the first at most `count`, and fewer if the rest is held.

        Raises:
            NoSpaceError: fewer blocks may leave, of the first group.
            ConfigError: no such tier or group, or a tier whose slots the engine owns.
        """

    def pin_copies(self, blocks: _Ids, tier: _Tier, *, now: int, group: int = 0) -> int:
        """Keep copies on their tier, while another machine reads them; takes no slot above.

        Args:
            blocks: handles of blocks that are there whole.
            tier: where.
            now: the time.
            group: group of layers, where groups are kept apart.

        Returns:
            The pin, for `unpin_copies`.

        Raises:
            ConfigError: a block that is not there whole, no such group, or a tier whose slots the
                engine owns.
        """

    def clear_copies(
        self, blocks: _Ids, tier: _Tier, *, group: int, now: int
    ) -> NDArray[np.uint64]:
        """Clear the windows or states of blocks, which an engine has not kept.

        The resume points that need them end; the blocks stay.

        Args:
            blocks: handles of the blocks.
            tier: where.
            group: a group of layers after the first.
            now: the time.

        Returns:
            Handles of the blocks that had a copy there, `uint64[n]`.

        Raises:
            ConfigError: a block that is gone or that a lease or a pin holds there, no such tier or
                group, or a tier whose slots the engine owns.
        """

    def known(self, tokens: _Tokens, *, scope: Scope | None = None) -> int:
        """Number of tokens at the front of a sequence that the first group of layers has.

        `lookup` covers fewer where another group lacks a window or a state. Pins and refreshes
        nothing.

        Args:
            tokens: the sequence.
            scope: whose blocks.

        Raises:
            ConfigError: tokens that cannot be.
        """

    def unpin_copies(self, pin: int, *, now: int) -> None:
        """End a pin. Ending it twice, or one that never was, does nothing.

        Args:
            pin: what `pin_copies` returned.
            now: the time.
        """

    def commit_many(
        self,
        lease_ids: _Ids,
        tokens: NDArray[np.integer[Any]] | Sequence[int] | Iterable[_Tokens],
        *,
        now: int,
    ) -> list[Committed]:
        """`Lease.commit` for many leases: all of them or, on an error, none.

        Args:
            lease_ids: the leases, each once.
            tokens: one token for each as one array or list, or one sequence for each.
            now: the time.
        """

    def index(
        self,
        tier: _Tier | None = None,
        *,
        now: int,
        blocks: _Ids | None = None,
    ) -> Index:
        """Index of the blocks on a tier, with which a later manager finds them again.

        Args:
            tier: which tier; None is the last one.
            now: the time; ages are counted from it.
            blocks: handles of the blocks to list, in this order; None lists all, parents first.
                Blocks that are not on the tier, or are gone, are left out. Costs O(blocks listed).

        Raises:
            ConfigError: a tier with layer slots, or a model without a fingerprint.
        """

    def load_index(self, index: Index, tier: _Tier | None = None, *, now: int) -> int:
        """Rebuild what a tier held.

        Each row is verified by the chain of keys from its scope to its block. Rows that cannot be
        used are left out: of another model, after a missing block, in a slot that is taken, no
        full block, or a part of one where holes may not be.

        Args:
            index: what `index` gave, or what a store kept of it.
            tier: which tier; None is the last one.
            now: the time.

        Returns:
            How many blocks are there again.

        Raises:
            ConfigError: a tier with layer slots, one whose slots the engine owns, or a model
                without a fingerprint.
        """

    def flush(self, *, now: int) -> int:
        """Copy blocks that are on no lower tier to the next tier, before a shutdown.

        The youngest goes first, parents before their children, and nothing younger leaves for
        it, so that a disk holds whole prefixes afterwards. Bytes move one tier at a time: carry
        the moves out and flush again, once per tier. `Executor.flush` does that.

        Args:
            now: the time.

        Returns:
            Number of moves that began.
        """

    def hint(self, hints: Iterable[Hint], *, now: int) -> list[HintReply]:
        """Take what an engine or an agent knows of the future; see `kvtrie.settings.hint`.

        All hints are looked at before the first one counts. They are soft: nothing but a lease
        pins, and no request fails that would go through without them. Without any hint, those
        whose time has come end.

        Args:
            hints: `Retain`, `Release`, `Prefetch`, `Demote`, `Quota`, `ResumeAt`, `Progress`.
            now: the time, from which times to live count.

        Returns:
            An answer for each.

        Raises:
            ConfigError: a hint that says nothing sensible; its message says which. No hint counts
                then. A lease or a session that is not there is no error but answered "rejected".
        """

    def next_due(self) -> int | None:
        """Return the time at which loads that wait are due.

        Call `hint` then; without a hint will do. Loads wait for their latest start after `Prefetch`
        with a deadline and after `Progress`. Other calls may change the time. None if no load
        waits.
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

        A version is the part of `Scope.lora` before its first space, such as a digest of weights.
        Retired blocks leave before all others, whatever hints say of them, until a request uses
        them or their version is kept again. Blocks that a lease, a move, a pin or a child needs are
        not dropped. A pass over all blocks is a call without `start`, and one per place returned.
        The cost of a call depends on `blocks` alone.

        Args:
            keep: versions whose blocks leave as their hints and policies say.
            retire: versions whose blocks leave first.
            others: what becomes of blocks of other versions.
            blocks: the number of blocks to visit.
            now: the time.
            start: where the pass goes on; None for its first call.

        Returns:
            Where the next call of the pass begins, None after the last one; the number of blocks
            that were retired, kept again or dropped; and of those in use that are to be dropped.

        Raises:
            ConfigError: a version that is not a str, another word, or a number out of range.
        """

    def expected_sessions(
        self, limit: int | None = None, *, now: int, scope: Scope | None = None
    ) -> list[tuple[str, float]]:
        """The sessions whose learned pause is about to end, the likeliest to go on soon first.

        For an engine that then hints `Prefetch(session=...)`; the manager makes no calls. Only
        sessions that wait, without a lease, and were not released are named. Empty where no tier's
        policy learns, as `learned` does.

        Args:
            limit: maximum number; None names all.
            now: the time; pauses are counted in requests, so nothing hangs on it.
            scope: whose sessions.

        Returns:
            Names, each with the uses per request that are expected of its last block.

        Raises:
            ConfigError: the scope was first used with another structure.
        """

    def unpriced(self, limit: int | None = None) -> Unpriced:
        """Blocks that have no cost yet, in the order of their handles' ids.

        They are handed out again until they have a cost. Until then the default one ranks them.

        Args:
            limit: maximum number; None for all.

        Raises:
            ConfigError: the manager was not made with `cost="python"`.
        """

    def set_costs(
        self, ids: int | Iterable[int] | NDArray[np.uint64], costs: Iterable[float], *, now: int
    ) -> int:
        """Set the cost of computing a token of each block again, in any unit that all share.

        It replaces the cost model's number: under `retention` a block is worth uses x cost / idle,
        under `flat` cost / idle. Policies that keep state per block use it from the block's next
        use on.

        Args:
            ids: handles of blocks. Those of blocks that are gone are left out; they name no other
                block.
            costs: one for each, finite and above 0.
            now: the time.

        Returns:
            How many of the blocks are not gone.

        Raises:
            ConfigError: not one cost for each block, a cost that is not finite and above 0, or a
                manager that was not made with `cost="python"`. Nothing has changed then.
        """

    def explain(
        self, block: _Block, *, now: int, tier: _Tier = 0, layer: int | None = None
    ) -> Explanation:
        """The price of a block on a tier, by the code that ranks victims, and its rank.

        Args:
            block: which block.
            now: the time.
            tier: on which tier.
            layer: the price of this layer alone, as if it left next by demotion; None prices the
                layers that would leave next. The rank is that of the block either way.

        Raises:
            ConfigError: the block or the layer is not on that tier.
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
        """Explain why tokens of a prompt would be computed now; changes nothing.

        A prompt parts from the cached sequences at one token. Up to `limit` cached branches there
        are compared with the rest of the prompt: that of the request's session, the one with the
        longest common prefix among the newest 64, then the newest. The call copies their tokens;
        they are compared when an attribute of the answer is read first, without any lock.

        Args:
            tokens: the prompt.
            now: the time.
            scope: whose KV; other tenants' blocks, sessions and scopes never influence the answer.
            session: the conversation that the prompt belongs to.
            limit: the most branches, 0 to 64. With 0 no branch is copied or compared, and what the
                answer calls "new" may be "diverged".

        Raises:
            ConfigError: tokens or a scope that cannot be, as for `lookup`.
        """

    def cost(
        self, layer: int, block: int, session_blocks: int, context: int, *, tier: _Tier = 0
    ) -> float:
        """Return the cost of one layer of a block that is demoted, as the tier's policy ranks it.

        It is in the unit of `Cost`, with the policy's weights of the layer and of the position.

        Args:
            layer: the layer.
            block: index of the block in its session.
            session_blocks: blocks of the session.
            context: tokens before the block.
            tier: whose policy.

        Raises:
            ConfigError: there is no such layer or tier, or the session has fewer blocks.
        """

    def sessions(self, *, scope: Scope | None = None) -> list[tuple[str, int, NDArray[np.uint64]]]:
        """Return every named session of a scope.

        A session is kept while a lease of it is held or a block of its path is cached, until a hint
        releases it. Of those without a lease at most eight end in one block; beyond that the least
        recently used one is forgotten.

        Args:
            scope: whose sessions.

        Returns:
            Name, length in blocks, and handles of its cached blocks, `uint64[n]`, of each.
        """

    def layer_tiers(self, block: _Block) -> NDArray[np.int8]:
        """Return the fastest tier that holds each layer of a block, `int8[layers]`; -1 for none.

        Raises:
            ConfigError: the block is not cached.
        """

    def stats(self) -> Stats:
        """Counters of requests, tiers and lanes, and what is held now, at one moment.

        It takes a few microseconds, so that an engine may ask at each step.
        """

    def evictions(self, limit: int | None = None) -> list[Eviction]:
        """The last entries of the eviction log, the oldest first; they stay in it.

        Only as many are kept as the manager was made with (`eviction_log`); `reset` empties it.

        Args:
            limit: maximum number, the newest; None gives all.
        """

    def take_events(self) -> list[Event]:
        """Take the events since the last call; only as many are remembered as `events` says.

        Events of residency, replayed in order, give the valid layers of every copy, whichever way
        it came or went; a copy that is leaving counts as gone. Those of one time that are taken
        together are its net effect: copies that left, children before parents, then copies that
        arrived, parents before children.
        """

    def snapshot(self) -> bytes:
        """The whole state, readable; equal for equal states. Neither times nor counters count."""

    def reset(self) -> None:
        """Forget all blocks and the time: the next call may have any time.

        Settings and counters stay, lanes are idle, and resident blocks count as evicted.

        Raises:
            ConfigError: a lease is held or a move has not ended.
        """

    def audit(self) -> None:
        """Check every invariant from scratch; for tests.

        Raises:
            InvariantError: one is broken; every later call raises it too.
        """

    def close(self) -> None:
        """End the manager: leases are gone, and later calls raise `ClosedError`."""

@final
class Lease:
    """A request's hold on blocks and slots; as a context manager it is released at the end.

    The object is only a name: dropping it releases nothing, and `BlockManager.lease(id)` gives it
    again. Every use of a released lease but `id`, `state` and `release` raises `ClosedError`.
    """

    @property
    def id(self) -> int:
        """Its id, never used twice."""

    @property
    def session(self) -> str | None:
        """The name of its session."""

    @property
    def state(self) -> Literal["active", "suspended", "released"]:
        """Whether it holds its blocks, its tokens only, or nothing."""

    @property
    def plan(self) -> Plan:
        """The plan as of now: blocks to reuse, load and compute. A failed move changes it."""

    @property
    def matched(self) -> int:
        """Tokens that the plan covers, a multiple of the block size; compute what follows."""

    @property
    def tokens(self) -> int:
        """Tokens that it holds: the match and what was committed."""

    @property
    def handles(self) -> NDArray[np.uint64]:
        """Handles of its full blocks in logical order, `uint64[n]`; none while it is suspended."""

    @property
    def room(self) -> int | None:
        """Tokens that can be committed before the next `reserve`.

        None where the engine owns the slots: as many as it has slots for.
        """

    @property
    def after(self) -> NDArray[np.uint64]:
        """Moves that must end before its slots may be read and written, `uint64[n]`."""

    def ready(self) -> bool:
        """Whether `after` is empty."""

    def slots(self, tier: _Tier = 0, group: int = 0) -> NDArray[np.uint32]:
        """The block table in logical order; on the first tier, reserved slots follow.

        Between two calls of the lease it changes on the first tier only for blocks whose loads have
        failed, and what follows them: a slot that the lease has is never taken back.

        Args:
            tier: index or kind of the tier.
            group: which group of layers, where they are kept apart. After the first one a slot on
                the first tier is one that the lease holds, or one to write before the block is
                committed: a block that has none then is not kept in that group. The block
                that a commit leaves partial may get its slot by that commit.

        Returns:
            `uint32[blocks]`, or `uint32[layers, blocks]` on a tier with layer slots; 2**32 - 1
            where a block is not on that tier, or its slot is not bound.

        Raises:
            ConfigError: there is no such tier or group.
        """

    def reserve(self, tokens: int, *, now: int) -> None:
        """Make room for more tokens after those held, unless there is room already.

        A tail that is shared with a fork is copied first: see `after`.

        Args:
            tokens: number of tokens that the next commits will add.
            now: the time.

        Raises:
            NoSpaceError: the first tier cannot hold them.
        """

    def bind(self, first_block: int, slots: _Ids, group: int = 0) -> None:
        """Name the slots of a tier that the engine owns.

        Args:
            first_block: index of the first block on the lease's path.
            slots: slots of this and the following blocks.
            group: the group of layers that the slots are of, where groups are kept apart. Slots of
                all groups share one numbering. A commit that ends at a border of `Plan.resume`
                stores what the border needs; the engine may reuse slots that no later token attends
                to once those stores have ended.

        Raises:
            ConfigError: the first tier is not the engine's, a block is bound to another slot, there
                is no such group, or a slot belongs to another group.
        """

    def unbind(self, first_block: int, group: int) -> None:
        """Forget the slots of earlier blocks in a group of layers: no later commit stores them.

        An engine calls it if it may have taken back a part of such a slot.

        Args:
            first_block: index of the first block on the lease's path that keeps its slot.
            group: the group of layers, after the first.

        Raises:
            ConfigError: the first tier is not the engine's, or there is no such group.
        """

    def load(
        self,
        layers: tuple[int, int] | None = None,
        blocks: tuple[int, int] | None = None,
        *,
        now: int,
    ) -> NDArray[np.uint64]:
        """Start the loads that `acquire(load="none")` or `resume(load="none")` left out.

        Args:
            layers: from this layer to before that one; all by default. Blocks of which a part is
                asked for are loaded from one end of what is still missing.
            blocks: from this block of the match to before that one; all by default. An engine whose
                private slots hold the first ones loads the rest. The plan has those not loaded as
                computed: the first commit confirms that they are written, by any writer.
            now: nanoseconds.

        Returns:
            The moves, `uint64[n]`.

        Raises:
            NoSpaceError: no room for blocks that pass through a tier.
            ConfigError: the layers or the blocks do not exist, or the layers would leave a gap.
        """

    def store_ahead(self, blocks: tuple[int, int] | None = None, *, now: int) -> NDArray[np.uint64]:
        """Start the stores of blocks that the engine will write, and commit later.

        For a first tier that the engine owns. `commit` adopts the copies instead of starting
        stores. Copies of blocks that are stored already are freed, as are those that `release`,
        `suspend`, a failed load or `drop_ahead` takes back, once no move writes them any more.
        The moves have no block and no `after`. They may run as soon as the block's slot is written
        (or layer by layer), and must run before it is written again; an `Executor` runs them at
        once.

        Args:
            blocks: from this block of the lease to before that one, after those it has committed;
                all that have slots by default.
            now: nanoseconds.

        Returns:
            The moves, `uint64[n]`: none for a slot that another lease has stored ahead too; of
            fewer blocks, the first ones, where the next tier has no slot that is free at once; and
            of none where a commit would not store them either: unless the
            first tier writes through, into memory, and admits at the first use.

        Raises:
            ConfigError: the first tier is not the engine's, or such blocks have no slots, or are
                committed.
        """

    def drop_ahead(self, *, now: int) -> None:
        """Take back what `store_ahead` started and `commit` has not taken over.

        Other tokens will be written than was thought.
        """

    def commit(self, new_tokens: _Tokens, *, now: int) -> Committed:
        """Append tokens whose KV is written; full blocks are cached from then on.

        The first commit also confirms that what the plan says to recompute is written. It may be
        empty.

        Args:
            new_tokens: the tokens, which follow those held; their KV is in the lease's slots.
            now: the time.

        Returns:
            Handles of the new blocks, and the slots of blocks that others committed first.

        Raises:
            ConfigError: no room for the tokens, or moves of `after` have not ended.
        """

    def truncate(self, tokens: int, *, now: int) -> None:
        """Keep the first `tokens` tokens. Blocks after them stay cached.

        A cut inside a block needs `reserve` before the next commit, which copies its front. Where
        groups of layers are kept apart the lease may keep fewer tokens: those up to a border at
        which all groups can go on, since no state is rolled back.

        Args:
            tokens: number of tokens that the lease holds afterwards, at most.
            now: the time.

        Raises:
            ConfigError: the lease holds fewer.
        """

    def fork(self, n: int, *, now: int) -> list[Lease]:
        """Make further leases over the same tokens, sharing all blocks.

        All of them, this one too, need `reserve` before the next commit, which copies a partial
        block. Where groups of layers are kept apart they also wait for copies of the windows and
        states that this lease still writes: see `after`.

        Args:
            n: number of leases.
            now: the time.

        Raises:
            ConfigError: something of the plan is still to be loaded or computed.
            NoSpaceError: there is no room for those copies.
        """

    def suspend(self, to: _Kind = "host", *, now: int) -> NDArray[np.uint64]:
        """Give the memory back and keep the tokens; never fails for want of room.

        Args:
            to: kind of the second tier; what has room there is written, the rest is dropped.
            now: the time.

        Returns:
            Moves that still use slots that the engine owns, `uint64[n]`.

        Raises:
            ConfigError: the second tier is of another kind.
        """

    def resume(self, reserve: int = 0, *, now: int, load: _Load = "plan") -> Plan:
        """Plan again for a suspended lease; blocks that are not `matched` must be committed again.

        Args:
            reserve: number of tokens after its end to make room for.
            now: the time.
            load: what is loaded, as for `acquire`.

        Raises:
            NoSpaceError: no room; the lease stays suspended.
            ConfigError: the lease is not suspended.
        """

    def release(self, *, now: int | None = None) -> NDArray[np.uint64]:
        """End the lease; its blocks stay cached. Releasing twice does nothing.

        Args:
            now: the time; None is the latest one that the manager has seen.

        Returns:
            Moves that still use slots that the engine owns, `uint64[n]`.
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
        tokens: how many tokens of the sequence it covers.
        handles: handles of its blocks in logical order, `uint64[n]`.
        blocks: its blocks in logical order, as they are when this is first read. A block that is
            gone by then has no tokens and no copies.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def handles(self) -> NDArray[np.uint64]: ...
    @property
    def blocks(self) -> tuple[MatchedBlock, ...]: ...
    def resident(self, tier: _Tier, *, skip: int = 0) -> int:
        """Number of its leading blocks that have all layers on a tier now.

        A copy that comes or leaves does not count, nor does a block that is gone. Cheaper than
        reading `blocks`, which it leaves alone.

        Args:
            tier: where.
            skip: number of first blocks to pass over.

        Raises:
            ConfigError: no such tier, or a match with fewer blocks.
        """

    def resumable(self, tier: _Tier, *, skip: int = 0) -> int:
        """Number of its blocks up to the last border at which a tier now has all for a resume.

        With one group of layers it is that of `resident`.

        Args:
            tier: where.
            skip: number of first blocks that do not count.

        Raises:
            ConfigError: as of `resident`.
        """

@final
class Miss:
    """Explanation of a miss: why the tokens of a prompt are computed.

    Attributes:
        tokens: tokens of the prompt.
        found: tokens found with a complete copy, per tier, where the fastest has them.
        parted_at: index of the first token that differs from the cached branches, inside a block
            too; None if nothing is cached there, or the prompt ends before it differs.
        parting: content key of the last block that the prompt has in common with them; None where
            it differs in the first block, or does not part.
        branches: the cached branches at that token.
        evicted: tokens after the match that were cached once and left. Known where a policy
            remembers evicted blocks (`learned` does), or with `explain=True`.
        in_flight: tokens that are known and have no complete copy yet.
        other_scope: tokens after the match that the same tenant has for another adapter, or for
            another digest at the parting.
        recomputed: tokens of the match that are expected to be computed faster than loaded.
        causes: for each range of computed tokens, the first, one after the last, and the cause:
            "new", "diverged" (at least .3 of the tokens after the parting recur in one branch),
            "evicted", "other scope", "no resume point" (cached, and a group of layers lacks its
            windows or its state there), "not stored yet", "recomputed" or "not cacheable" (the last
            block is not full).
    """

    @property
    def tokens(self) -> int: ...
    @property
    def found(self) -> list[int]: ...
    @property
    def parted_at(self) -> int | None: ...
    @property
    def parting(self) -> bytes | None: ...
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
    """Cached branch from which a prompt parted.

    Attributes:
        tokens: its tokens from the parting on, at most 64, `uint32[n]`.
        cached: tokens cached after the parting, along the newest blocks, at most 131 072.
        idle: nanoseconds since the last use of its first block.
        session: the session that ends with it; None for none.
        recurring: tokens of the prompt after the parting that are covered by runs of at least 16
            tokens that the branch has too, at any offset.
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
        tokens: its tokens, `uint32[block_tokens]`; with digests in place, numbers from 0x80000000
            on.
        copies: its copies, fastest tier first; none for a hole.
    """

    @property
    def block(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def copies(self) -> tuple[Copy, ...]: ...

@final
class Copy:
    """One copy of a block on one tier.

    Attributes:
        tier: index of the tier.
        group: group of layers, where groups are kept apart; layers count within it.
        slot: its slot; with layer slots that of its first coming layer.
        slots: its slots: one, or with layer slots one for each of its coming layers.
        layer_lo: first layer that is valid now.
        layer_hi: the last layer that is valid now, plus 1.
        coming_lo: first layer that will be valid at `ready`.
        coming_hi: the last layer that will be valid at `ready`, plus 1.
        first: when the first of the coming layers is expected, in nanoseconds.
        ready: when all coming layers are expected, in nanoseconds.
        leaving: whether it was chosen to leave: it is valid until the store that reads it has
            ended. A request that finds it before its slots are promised to another one keeps it.
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
    """Steps that bring a request's match to the first tier, and the time the prompt is computed.

    Spans cover only the match: the engine computes the rest of the prompt after the positions to
    recompute.
    """

    @property
    def spans(self) -> list[Span]:
        """The actions on ranges of tokens and layers, in logical order."""

    @property
    def finish(self) -> int:
        """Predicted time at which the prompt is computed to its end, in nanoseconds.

        It counts the loads, waiting for their lanes included, recomputed tokens of the match, and
        all tokens after it; not the tokens that `reserve` makes room for. Recomputation runs while
        lanes load. The rest of the prompt begins when all of the match is there, or under
        `acquire(layerwise=True)` each layer of it when that layer of the match is: then everything
        that is computed is one pass, and the loads of a lane bring layer 0 of all their blocks
        first.
        """

    @property
    def exact(self) -> bool:
        """Whether no plan can finish earlier, as far as lanes and costs are predicted rightly."""

    @property
    def resume(self) -> list[int]:
        """Token borders after the match at which a pass should end, ascending.

        Each becomes a resume point when it is committed: with states only where a pass, and so a
        commit, ends there. Empty for a model whose groups of layers are not kept apart.
        """

    def recompute(self, layer: int | None = None) -> NDArray[np.int64]:
        """Positions whose KV the engine must write at `layer`, ascending, `int64[n]`.

        Args:
            layer: the model layer; None gives the positions of all layers together.

        Raises:
            ConfigError: the model does not have that layer.
        """

    def ready(self, layer: int) -> int:
        """Predicted time at which what is reused and loaded of a layer is there, in nanoseconds.

        A span of `n` blocks and `l` layers counts as `n` equal transmissions in a row: layer `i` of
        it is there at `ready - (l - 1 - i) * (ready - first_ready) / (n * l - 1)`. 0 if nothing is
        reused or loaded.

        Args:
            layer: the model layer.

        Raises:
            ConfigError: the model does not have that layer.
        """

@final
class Span:
    """Action on some layers of consecutive tokens.

    Attributes:
        start: first token.
        stop: the last token plus 1.
        layer_lo: first layer.
        layer_hi: the last layer plus 1.
        action: what happens.
        tier: index of the tier where the bytes are.
        first_ready: predicted time at which the first layer is there, in nanoseconds.
        ready: predicted time at which all of it is there, in nanoseconds.
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
        kind: what they are for: `LOAD`, `STORE` or `COPY`.
        lease: leases that asked for them, or the first that wait for them; 0 for none.
        block: handles of the blocks; 2**64 - 1 for one that is partial, or not committed yet.
        key: content hashes of the blocks, `uint8[n, 32]`. Zeros unless a disk or remote tier
            takes part.
        src: indices of the tiers to read.
        dst: indices of the tiers to write.
        src_slot: slots to read: layer slots if that tier has them.
        dst_slot: slots to write: layer slots if that tier has them.
        group: layer groups.
        layer_lo: first layers.
        layer_hi: the last layers plus 1.
        after: moves that must have completed well, on all ranks, before these start on any; 0 for
            none.
        tokens: tokens of the blocks that are valid: fewer than a block only for copies.
        label: `bytes` that a disk or remote tier keeps with each block, by which a later manager
            finds it again. Empty unless that tier is the destination.
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
        """The moves that carry a layer, cut to it.

        Ids stay: report progress by `layers_done` until all layers of a move are done.
        """

    def of_layers(self, layers: int) -> Moves:
        """The same moves of whole blocks, for a rank that has `layers` layers of the model.

        Pipeline stages have unequal numbers of layers; a manager of whole blocks need not know.

        Raises:
            ConfigError: not a number from 1 to 65 535.
        """

    def together(
        self, tiers: Sequence[int] | NDArray[np.integer[Any]]
    ) -> tuple[list[Moves], Moves]:
        """Moves that can be copied at once.

        Args:
            tiers: indices of the tiers between which that is so.

        Returns:
            The moves between these tiers that wait for none: in each part all have the same kind,
            lease, tiers and layers. And all others, in their order.

        Raises:
            ConfigError: a tier that is no number from 0 to 255.
        """

    def to_bytes(self) -> bytes:
        """The columns as bytes.

        All numbers are little-endian: the magic `kvtrmove`, version `u32` = 2, zero `u32`, number
        of moves `u64`, then the columns, without padding between them, in the order and types
        id, kind, lease, block, key, src, dst, src_slot, dst_slot, group, layer_lo, layer_hi,
        after, tokens, length of the label `u32`; then the labels.
        """

    @staticmethod
    def from_bytes(data: bytes) -> Moves:
        """What `to_bytes` gave.

        Raises:
            ConfigError: bytes of another format or version, cut short, or with moves that cannot
                be.
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int | np.integer[Any], /) -> Move: ...
    @overload
    def __getitem__(
        self, index: slice | Sequence[int] | NDArray[np.bool_ | np.integer[Any]], /
    ) -> Moves:
        """The moves of a slice, of a mask or at indices, as numpy chooses and in its order."""

    def __iter__(self) -> Iterator[Move]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Move:
    """One move: copy layers of a block from slot to slot.

    Attributes:
        id: its id, never used twice.
        kind: `Moves.LOAD`, `Moves.STORE` or `Moves.COPY`.
        lease: the lease that asked for it, or the first that waits for it; 0 for none.
        block: handle of the block; 2**64 - 1 for one that is partial, or not committed yet.
        key: content hash of the block, 32 bytes; zeros unless a disk or remote tier takes part.
        src: index of the tier to read.
        dst: index of the tier to write.
        src_slot: slot to read: a layer slot if that tier has them.
        dst_slot: slot to write: a layer slot if that tier has them.
        group: layer group.
        layer_lo: first layer.
        layer_hi: the last layer plus 1.
        after: the move that must have completed well, on all ranks, before this one starts on any;
            0 for none.
        tokens: tokens of the block that are valid: fewer than a block only for a copy.
        label: bytes that a disk or remote tier keeps with the block; empty for any other
            destination.
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
    """The files of one store, as `kvtrie.tiers.disk.DiskStorage` uses them.

    Calls leave the interpreter to other threads while files are read and written.

    Attributes:
        folder: its own folder.
        read_only: whether it may not write: another process does, the folder forbids it, or was
            removed or replaced while it was open.
        refusal: why it may not, if so.
        about: what its KV means, as JSON.
        layers: layers of a block.
        layer_bytes: bytes of one layer of a block.
        block_tokens: tokens of a block.
        slots: how many blocks it may hold.
        slot_bytes: bytes that a block takes on disk.
        disk_bytes: bytes that its files take now.
        travel: whether bytes pass the page cache by, which queue moves them, and why it is not
            what was asked for.
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
        """Open the store whose own folder this is, as its manifest describes it."""

    @staticmethod
    def stores(folder: str | PathLike[str]) -> list[tuple[Path, str | None]]:
        """The stores in a folder: each one's own folder, and why it cannot be read if so."""

    @staticmethod
    def blocks_in(budget: int, layers: int, layer_bytes: int, block_tokens: int) -> int:
        """Number of blocks that fit into a budget in bytes, all files counted.

        `layer_bytes` are those of the layout, padding included.
        """

    @staticmethod
    def bytes_for(blocks: int, layers: int, layer_bytes: int, block_tokens: int) -> int:
        """Bytes that all files for this number of blocks take at most."""

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

        Returns for each the reason of its failure, or None.
        """

    def write_many(
        self,
        blocks: Sequence[tuple[bytes, int, tuple[int, int], NDArray[np.uint8], bytes]],
        wall: int,
        *,
        depth: int = 8,
    ) -> list[str | None]:
        """Write blocks as `write` does, given as its arguments, up to `depth` of them at once.

        Returns for each the reason of its failure, or None.
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
        """Write layers of a block from `memory`; `wall` is the wall clock in nanoseconds."""

    def index(self, wall: int, *, group: int = 0) -> Index:
        """Index of the blocks here, as rows of a group, with ages as of `wall`."""

    def save(self, index: Index, wall: int, *, group: int = 0) -> None:
        """Keep exactly the blocks of an index in a group; every other slot is free afterwards."""

    def note_uses(self, index: Index, wall: int, *, group: int = 0) -> int:
        """Persist ages and uses of the blocks of an index in a group, for the next process.

        All else stays. Rows that name another block than the slot has are left out. Nothing is
        synced: a power loss may lose the noted ages and uses, never a block.

        Args:
            index: what `BlockManager.index` gave of some blocks.
            wall: the wall clock in nanoseconds.
            group: of the rows that count.

        Returns:
            How many of the blocks are there.

        Raises:
            ConfigError: a slot that is not there.
            TransferError: the device failed, or the store is read-only.
        """

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Every block as a row for people.

        Returns:
            Slot, key, first layer, last layer plus 1, nanoseconds since the last use, uses, and
            whether all blocks before it are there too.
        """

    def verify(
        self, progress: Callable[[int, int], object] | None = None
    ) -> list[tuple[int, bytes, str]]:
        """Read and verify every block, and remove what is damaged where it may write.

        For tests: it is one call, which Ctrl-C does not end. People use `kvtrie disk verify`, which
        goes block by block.

        Args:
            progress: called with the number of blocks done and of all blocks.

        Returns:
            Slot, key and reason of each block that could not be proved.
        """

    def gc(self) -> int:
        """Give back what free slots and dead entries take; return the number of bytes."""

    def clear(self, first: int, end: int) -> None:
        """Free the slots from `first` to before `end`, and give their space back."""

    def remove(self, slot: int) -> None:
        """Free a slot."""

    def sync(self) -> None:
        """Make everything that was written durable."""

    def reasons(self) -> list[str]:
        """Take the reasons for which blocks were skipped or removed since the last call."""

    def close(self) -> None:
        """Write what is still in memory and give the lock back. Closing twice does nothing."""

@final
class KeptFile:
    """Table of the slots of a host pool that is a file in memory.

    Attributes:
        path: its path.
        about: meaning of its KV, as JSON.
        layers: layers of a block.
        layer_bytes: bytes of one layer of a block.
        block_tokens: tokens of a block.
        slots: how many blocks it may hold.
        identity: the digest of `about`.
        pool: start of the pool in the file, and length of the file.
        found: whether it is the file of an earlier process.
        cold: why the blocks of an earlier file cannot be used; None if there was none.
        descriptors: the one to map, and the one that has the lock, which a fork has to close.
        sealed: slots that the next process would find.
        unproved: slots of earlier processes that nothing has proved or written yet.
        lost: blocks that were lost, by reason.
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
        """Opens a file for its only writer, or takes the room for it.

        One that is new, or whose blocks cannot be used, is made when the first slot is written;
        closed before that, it is as it was.

        Returns:
            The file; None if another process has its lock, then with the id of that process, if
            known, and whether it has died.

        Raises:
            ConfigError: no memory file system, another user's file, or one with other content
                unless `replace`.
            TransferError: no room.
        """

    @staticmethod
    def inspect(path: str | PathLike[str]) -> KeptFile:
        """Opens a file with the settings of its header and without its lock; for tools."""

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
    def descriptors(self) -> tuple[int, int | None]: ...
    @property
    def sealed(self) -> int: ...
    @property
    def unproved(self) -> int: ...
    @property
    def lost(self) -> dict[str, int]: ...
    def begin(
        self, slots: Sequence[int], keys: Sequence[bytes], layers: tuple[int, int]
    ) -> list[str | None]:
        """Marks slots as being written, before the first byte.

        Returns:
            An error or None for each.
        """

    def finish(
        self, slots: Sequence[int], keys: Sequence[bytes], ok: bool
    ) -> list[tuple[int, int, tuple[int, int]]]:
        """Notes that copies into slots have ended.

        Returns:
            Slot, generation and layers of those that can be sealed now.
        """

    def seal(
        self,
        slots: Sequence[tuple[int, int, tuple[int, int], NDArray[np.uint8], bytes]],
        wall: int,
    ) -> int:
        """Seals slots, given with the memory of their layers and their labels; returns how many."""

    def to_prove(self, slot: int) -> tuple[int, int] | None:
        """The layers over which a slot is to be proved before its first use, if at all.

        Raises:
            TransferError: it is damaged.
        """

    def prove(self, slot: int, key: bytes, memory: NDArray[np.uint8]) -> None:
        """Proves the block of an earlier process by the memory of its layers.

        Raises:
            TransferError: it is damaged, or another block.
        """

    def index(self, wall: int, slots: NDArray[np.int64] | None = None) -> Index:
        """The index of the blocks that are here; `slots` renumbers them, below 0 leaves one out."""

    def note_uses(self, index: Index, wall: int, slots: NDArray[np.int64] | None = None) -> int:
        """Notes the ages and uses of the blocks of an index, whose slots `slots` renumbers."""

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Every block as a readable row, as of a `DiskStore`."""

    def verify(self, slot: int, key: bytes) -> None:
        """Reads a slot through the file and proves it; for tools.

        Raises:
            TransferError: it is damaged, or another block.
        """

    def close(self) -> None:
        """Gives the lock back, once no other call runs. Closing twice does nothing."""

@final
class Index:
    """Blocks on a tier, parents before their children, as columns of equal length.

    Attributes:
        key: content hashes of the blocks, `uint8[n, 32]`.
        slot: their slots.
        layer_lo: first layers that are there.
        layer_hi: the last layers plus 1.
        age: nanoseconds since their last use.
        uses: how often they were used.
        session_blocks: blocks of their sessions; 0 for none.
        group: their groups of layers. Rows of a group after the first follow that of their block in
            the first, and are those that resume points need.
    """

    def __new__(
        cls, rows: Iterable[tuple[bytes, int, int, int, *tuple[int, ...]]] | None = None
    ) -> Self:
        """An index of given rows.

        Args:
            rows: tuples (label, slot, layer_lo, layer_hi), with the group as a fifth after the
                first group, as iterating gives them.

        Raises:
            ConfigError: bytes that are no label, or a number that cannot be.
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
        """The rows of both, one after another."""

    def __radd__(self, value: Index, /) -> Index: ...
    def __iter__(self) -> Iterator[tuple[bytes, int, int, int, *tuple[int, ...]]]: ...

@final
class Committed:
    """Result of a commit.

    Attributes:
        new: handles of the blocks that entered the trie, `uint64[n]`.
        duplicate: private slots whose block another lease had committed already and still uses,
            `uint32[k]`. They stay the lease's until release.
        canonical: handles of the blocks that won, one for each duplicate, `uint64[k]`.
        ahead: how many of the new blocks had been stored by `store_ahead`: their copies were taken
            over.
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
    """Tokens that will not be where a plan said.

    Attributes:
        lease: the lease concerned; 0 if none is.
        block: handle of the block; None for a partial one.
        start: first token on the lease's path.
        stop: the last token plus 1.
        reason: what the executor said.
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

    `value = cost / idle` with `cost` the product of terms and weights (Pensieve, Section 4.3.1);
    what a policy does not use is 1.

    Attributes:
        cost: the product of all terms and weights.
        terms: cost of computing a token of the block again, and how often it was used.
        weights: weight of the layers that would leave, and of the block's position in its
            session.
        idle: nanoseconds since the last use.
        value: retention value: cost per second of idle time; infinite at zero idle time.
        priority: 35 if no hint names it; a lower one leaves the tier first, whatever its value. It
            is 35 too where the tier retains as many blocks as it may.
        rank: how many copies leave the tier before it; None while it cannot be a victim.
        layers: the layers of the price: first, and last plus 1.
        words: under `learned` the class of the block's last use, the lives that were counted and
            what they make it worth, in words; None under any other policy.
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
        mediums: the medium of each tier; None of a tier that is not published.
        hashes: name of a block: "int" for the last 8 bytes of its content key, "bytes" for the key.
        form: each event as a "map" or an "array".
        rank: data-parallel rank of the engine.

    Raises:
        ConfigError: a wrong argument, a manager without such events, or with another such object
            that is not closed.
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
            contents: whether the contents are wanted too, as a batch that clears a reader first.

        Returns:
            the events as a msgpack batch, None without any; the contents, if wanted or if events
            were lost; blocks stored, removed and withheld; whether events were lost.

        Raises:
            ClosedError: the manager is closed.
        """

    def close(self) -> None:
        """Allow another such object."""

@final
class HintReply:
    """Result of a hint.

    Attributes:
        answer: "accepted": in force for all blocks that it names; "clipped": for some of them;
            "deferred": it names blocks that are not cached, and waits for them; "rejected": it
            changes nothing for any block that is there.
        blocks: for how many blocks it is in force now.
        left: how many blocks it names that it is not in force for.
        code: the last reason why not for all of them, for programs. "accepted": it is; "absent":
            its path, session, lease or owner has no such block; "waiting": blocks are not cached
            yet; "share": a tier retains as many blocks as it may; "full": the scope has as many
            pending hints as it may; "crowded": as many loads as may be are in flight to the tier;
            "late": they would arrive after the deadline; "no-room": the tier has no room;
            "incomplete": no tier has all layers that the load needs; "in-use": they are in use,
            or no tier can take them.
        reason: why not for all of them, for people; empty if it is accepted. Its words may change.
    """

    @property
    def answer(self) -> Literal["accepted", "clipped", "deferred", "rejected"]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def left(self) -> int: ...
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
    """Blocks whose cost has still to be said; every array has one entry per block.

    Attributes:
        id: handles of the blocks, `uint64`.
        context: tokens before each block, `uint64`.
        index: each block's index in its sequence, from 0, `uint32`.
        uses: how often each was used, `uint32`.
        session_blocks: blocks of its session, or up to its own end if it belongs to none, `uint32`.
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
    """Some layers of a block left a tier, or arrived on one.

    Attributes:
        kind: "removed", or "stored" for layers that arrived.
        at: when, in nanoseconds.
        block: handle of the block.
        layer_lo: first layer that left or arrived.
        layer_hi: the last such layer plus 1.
        tier: index of the tier.
        group: group of layers, where groups are kept apart; layers count within it.
        reason: of an eviction: another tier has the block too, it is written one tier down, or it
            was the last copy. None of residency.
        cause: cause of the eviction; `TierStats` lists them. None of residency.
        to: index of the tier it went to. None of residency.
        idle: nanoseconds since its last use. None of residency.
        number: place among all events of residency, from 0 on: a gap shows that some were
            overwritten. None of evictions, as all below.
        key: content key of the block, 32 bytes, equal in every process.
        parent: content key of the block before it; of its scope for a first block.
        first: whether it is the first block of a sequence.
        tokens: tokens of a block that was stored; none of one removed.
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
    """One entry of the eviction log: why some layers of a block left a tier.

    Attributes:
        at: when, in nanoseconds.
        block: handle of the block.
        position: its place in its sequence, in blocks.
        tenant: the salt of the tenant whose it was.
        lora: the name of the adapter whose it was.
        tier: index of the tier it left.
        to: index of the tier it went to; None if to none.
        layers: the layers that left: first, and last plus 1.
        cause: cause of the eviction; `TierStats` lists them.
        reason: another tier has the block too, it is written one tier down, or it was the last
            copy.
        uses: how often it was used.
        idle: nanoseconds since its last use.
        cost: the product of all terms.
        terms: the terms and weights of `Explanation`, under the policy of the tier.
        value: retention value: cost per second of idle time; infinite at zero idle time.
        next_value: value of the copy that would have left next; None if none could. It may be lower
            where the block before this one could not leave until now.
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

    Classes are at most a sixteenth wide, so quantiles are at most that much too long. Times above
    13 days count as 13 days; `sum` is exact.

    Attributes:
        count: how many times were recorded.
        sum: their sum, in nanoseconds.
    """

    @property
    def count(self) -> int: ...
    @property
    def sum(self) -> int: ...
    def quantile(self, share: float) -> int:
        """Return the time that a share of all times did not exceed, in nanoseconds; 0 without any.

        Args:
            share: 0 to 1, as 0.99 for the 99th percentile.

        Raises:
            ConfigError: a share below 0 or above 1.
        """

    def up_to(self, bounds: Iterable[SupportsIndex]) -> list[int]:
        """Number of times that were at most as long as each bound.

        The class that contains a bound counts as below it.

        Args:
            bounds: nanoseconds, ascending.

        Raises:
            ConfigError: a bound that is not above the one before it.
        """

    def since(self, before: Histogram) -> Histogram:
        """The times recorded after `before` was taken.

        Raises:
            ConfigError: `before` is no earlier state of this one.
        """

    def as_dict(self) -> dict[str, int]:
        """Its `count`, `sum`, `p50`, `p90`, `p99` and `max`, in nanoseconds."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class GroupStats:
    """Slots of one group of layers on a tier."""

    @property
    def held(self) -> int:
        """Slots of blocks and states that a resume point or a lease holds.

        Of the first group, all that are not free.
        """

    @property
    def released(self) -> int:
        """Slots that are found until they are taken, before any victim."""

@final
class LaneStats:
    """Counters of one lane.

    Attributes:
        busy_ns: nanoseconds in which it carried something, as `saw_lane` or an `Executor` reported.
            No declared speed changes it.
        predicted_ns: nanoseconds that its transmissions take at its declared speed, latency
            included.
        bytes: bytes given to it.
        free_at: when its queue is idle, in nanoseconds.
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
    """Counters of one tier since the manager was made, and its present contents.

    An eviction is counted when it is decided; with layer slots each range of layers that leaves
    counts. Its causes: "demand", its room was wanted at once; "ahead", its room was wanted for
    something that is written down before its slot is needed; "suspended", its lease was; "failed",
    it could not be read or came after a lost block; "cleared", by `mark`; "reset"; "hinted",
    by a `Demote` hint.

    Attributes:
        kind: which tier.
        policy: what decides which copies leave.
        slots: all slots.
        free: slots that can be written at once. On a tier that the engine owns all of them, always,
            as on an empty one: which are in use only the engine knows.
        coming: slots without an owner that a store still reads.
        evictable: copies that could be victims now.
        copies: blocks that are here, with all or some of their layers; arriving ones do not yet.
        clean: copies that could be dropped at once without a loss: their layers are below too, or,
            on the last tier, above.
        dirty: the other copies.
        retained: copies that a hint retains.
        hits: blocks that requests found here. A block that is loaded in part counts where it is
            loaded from, one that is computed again in part is no hit. A block loaded by
            `Lease.load` counts when all of it is in flight.
        misses: full blocks that requests asked for and found neither here nor on a faster tier;
            what a request with `load="none"` leaves out is one when its lease ends.
        tokens_hit: tokens that requests found here.
        evicted: evictions.
        evictions: evictions by cause.
        groups: slots of each group of layers, in the model's order, where the manager keeps groups
            apart; otherwise empty.
        evicted_clean: evictions that were instant because another tier has a copy.
        evicted_dirty: evictions that had to be written first.
        dropped: evictions of last copies.
        demoted: stores of a block begun into this tier.
        promoted: loads of a block begun out of this tier.
        bytes_freed: bytes that evictions gave back.
        bytes_read: bytes that moves read from here.
        bytes_written: bytes that moves wrote to here.
        moves: moves into this tier.
        failed: moves into this tier that failed.
        stores_dropped: on tier `remote`: blocks that were evicted from the tier above before a
            worker began to store them here.
        move_ns: nanoseconds from begin to end, summed over moves into this tier.
        compared: how often `audit` compared the next victim with the least by costs that are not
            rounded.
        regrets: how often the victim's value was above that: by at most `epsilon`, so never at 0.
        hit_age: since the last use, of blocks that requests found here.
        evict_age: since the last use, of copies that left.
        load_time: from being handed out to the end, of loads that read from here and ended well.
            A move is handed out at the latest time that the manager has seen.
        store_time: the same of stores that wrote to here.
        copy_time: the same of copies within this tier.
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
    """All counters of a manager at one moment; they only grow, and `reset` leaves them.

    Attributes:
        tiers: counters per tier, fastest first.
        lanes: counters per lane, by name.
        requests: requests that got a lease; resumed ones do not count again.
        refused: requests that did not fit.
        blocks_wanted: full blocks of the prompts of the former. Hits on all tiers and misses of the
            last one add up to them.
        tokens_wanted: tokens of those prompts.
        inserted: blocks that entered the trie by a commit.
        duplicates: blocks that a lease computed while another one had committed them already.
        blocks: blocks that the trie knows now.
        leases: leases held now.
        moves: moves that have not ended.
        queued: moves that wait to be handed out.
        failed_lost: rows of `failed` that later ones took the place of before they were taken.
        clamped: calls that came with a time below the latest one.
        doubted: calls that came with a time more than a day beyond the latest one and were served
            at that; the next call is believed if it comes with about the same time.
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
        """Statistics since `before` was taken: counters and histograms are differences.

        Present contents and `now` are those of this object. A rate is a difference divided by
        `(after.now - before.now) / 1e9` seconds.

        Raises:
            ConfigError: `before` is no earlier state of the same manager.
        """

    def as_dict(self) -> dict[str, Any]:
        """The same as dictionaries of numbers, for JSON; histograms as `Histogram.as_dict`."""

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
        """Offset of a layer in a value."""

    def names(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The names `(blocks, 32)` of blocks by their content keys `(blocks, 32)`."""

    def headers(
        self, blocks: Sequence[tuple[bytes, bytes, NDArray[np.uint8]]]
    ) -> list[tuple[bytes, str | None]]:
        """The headers of blocks, given as key, label and all layers.

        Returns:
            A header and None for each, or no bytes and the reason.
        """

    def verify(
        self,
        blocks: Sequence[tuple[bytes, NDArray[np.uint8], tuple[int, int], NDArray[np.uint8]]],
    ) -> list[str | None]:
        """Verify blocks that were read, given as key, header, layers and memory.

        Returns:
            The difference for each, or None.
        """

@final
class ValueFolder:
    """Values in the files of a folder, as `kvtrie.tiers.remote.folder` uses them.

    Calls leave the interpreter to other threads. Times are nanoseconds that are left. Results are
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
            folder: a folder of values, which others may be using.
            expired: nanoseconds of the wall clock; None removes no value.
            stale: nanoseconds of the wall clock.

        Returns:
            Values and staging files that were removed, the bytes of both, and values left.

        Raises:
            ConfigError: the folder is none of values.
        """

    def sweep(self, before: int) -> int:
        """Remove staging files older than nanoseconds of the wall clock; return how many."""

    def path(self, name: bytes) -> Path:
        """The file of a value."""

    def exists_many(self, names: Sequence[bytes], left: int) -> list[tuple[str, str]]:
        """Whether there are values of these names."""

    def get_many(
        self,
        values: Sequence[tuple[bytes, NDArray[np.uint8], int, NDArray[np.uint8]]],
        left: int,
    ) -> list[tuple[str, str]]:
        """Read values, given as name, memory of the header, offset and memory of the layers."""

    def put_many(
        self, values: Sequence[tuple[bytes, bytes, NDArray[np.uint8]]], left: int
    ) -> list[tuple[str, str]]:
        """Write values that are absent, given as name, header and memory."""

    def remove_many(self, names: Sequence[bytes]) -> list[tuple[str, str]]:
        """Remove values."""

@final
class Simulation:
    """Machines that serve a trace on the trace's clock, each with its manager.

    Nothing is copied or computed: an executor in it takes the time that copies take. Equal
    arguments and requests give equal results. `kvtrie.sim.run` makes one from a file of settings.
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
                `cost`, `structure`, `drop_order`, `reuse`, `epsilon`, `objective` and `resume`,
                which machines with peers, a network or a shared store do not take.
            tiers: of each machine, fastest first.
            price: what a token takes to compute, in 2**-32 ns: `(base, slope)`, the slope per token
                of context, or ascending pairs `(context, price)`, linear between them. Or `(base,
                prefill, decode, request)` in ns: of a step without tokens, beyond it `(contexts,
                counts, rows)` by tokens of a prefill and by requests that decode, and of a request
                outside of steps.
            machines: how many machines (1), or `(tiers, price, cost)` of each, whose tiers are of
                the same kinds as `tiers`. A tier 'remote' goes with one machine, without `remote`.
            block_tokens: tokens of one block.
            token_weight: real tokens for each given one.
            policy: which copies leave first.
            cost: what managers take the price for.
            structure: whether blocks inside a sequence may leave.
            drop_order: which layers of a last copy leave first.
            reuse: whether policies that may count uses do.
            epsilon: how far apart classes of costs are.
            objective: what policies by value save.
            resume: how managers keep groups of layers apart; None keeps all layers of all tokens.
            load: as for `BlockManager.acquire`.
            keep: real tokens at a prompt's end that are always computed.
            wait: whether a prefill waits for all of its loads before it joins a step, each layer
                for its own, or the step that it joins for all of them.
            router: which machine a request goes to: each in turn, the one with the fewest requests,
                or a fixed one for each session (without one, for each first block). By
                `("locality", ratio)` the one that has most of the prompt, of those whose requests,
                this one counted, are at most `ratio` (in 2**-32) times the fewest. By `("score",
                hit_weight, load_weight)` the one with the lowest sum of the prompt's tokens that it
                would compute and the tokens of prompts there that have not ended, each times its
                weight. Of equal ones the least loaded, then the lowest number.
            transfer: whether moves take the time that the executor needs, or end when the manager
                predicted, as `kvtrie.sim.replay` has it.
            moves_per_job: the most moves of one transmission.
            prefetch: whether a request's blocks are loaded from when it comes in, as a hint asks,
                or when it begins.
            peers: the lane between two machines, over which one fetches what another one's host or
                disk holds. Each ordered pair has one; with `shares` all are one queue, which lanes
                of tiers that share that name enter too. None fetches nothing.
            engine: how requests are computed: one after the other, or all together in steps, or
                so with prompts on the first machines and answers on the others.
            token_budget: the most tokens of a step of the continuous engine.
            max_running: the most requests that hold blocks there, at most the budget.
            token_by_token: whether each of its steps that only decodes is a separate event.
            prefill: how many machines compute prompts for a disaggregated engine.
            network: the lane between two machines over which it hands requests over, if `peers`
                is None.
            directory_ns: how late routers and peers learn which machine has which blocks, by events
                of residency; None asks every manager each time.
            clients: how many ask, each with one conversation at a time; None if arrivals do not
                wait for answers.
            logged: keep all calls of managers for `log`.
            remote: the last tier, of kind 'remote', is one store of all machines with room for its
                `blocks`; a machine finds there "all" blocks, those that others wrote the latency of
                `read` after they were written, or "local", its own. Lanes with `shares` are one
                queue of all machines. None: a tier 'remote' belongs to one machine.
            reports: the hint that a tool's report becomes, the tier on which the session's blocks
                are wanted, and whether they go to the last tier when the tool begins.

        Raises:
            ConfigError: settings that contradict each other.
        """

    @staticmethod
    def over(
        manager: BlockManager, *, load: Literal["plan", "all", "none"] = "all", running: int = 1
    ) -> Simulation:
        """Make one machine with a given manager, whose engine computes in no time.

        Moves end when the manager predicted.

        Args:
            manager: one without moves under way.
            load: as for `BlockManager.acquire`.
            running: the number of requests that hold their blocks at a time; the others have ended.
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
        """Play requests to their end; other threads run Python during it.

        Args:
            requests: `(arrival_ns, tokens, input_tokens, output_tokens, session)`, in order of
                arrival, and as a sixth a mapping of more, as `kvtrie.sim.readers.rows.More`: `last`
                and `tool` become hints to the machine that serves the request. With `clients`
                conversation after conversation: the requests that follow each other with one
                session, or a single one without. Then `arrival_ns` is the time to think between the
                answer before, or 0, and the request.
            on_record: called with each record, in order: `(id, machine, arrival_ns, first_token_ns,
                end_ns, tokens found per tier, tokens found on a peer, tokens computed, ns in the
                queue and waited for copies, ns that computing what was found would have taken per
                tier and last for the peer, times suspended, tokens of the answer)`; the times of
                one that did not fit are None, and it has no tiers.
            decide: called with each decision of the router, in order: `(id, arrival_ns, chosen,
                others, regret_ns)`. A machine is `(number, tokens of the prompt that it has, tokens
                of prompts there that have not ended, cost_ns)`, by exact knowledge. Its cost is the
                estimated time to the first token: to compute the tokens it lacks, after those of
                the requests there that have not ended. The regret is the cost of the chosen one
                less the least.
            best: number of other machines reported, the best ones first.

        Raises:
            ConfigError: a request that arrives before the one above it.
        """

    @property
    def now(self) -> int:
        """The time of the last event, in nanoseconds."""

    def tiers(self) -> list[tuple[int, int, int, int, int]]:
        """Per tier, over all machines: blocks and tokens hit; evicted clean, demoted, dropped."""

    def prefetched_byte_s(self) -> list[int]:
        """Per tier, over all machines: byte-seconds that prefetched blocks waited for a first use.

        A block waits from its arrival on; on the first tier nothing is counted.
        """

    def lanes(self) -> dict[str, tuple[int, int, int]]:
        """Bytes, busy ns, and ns waited for the transmissions before, of each lane, in all."""

    def watch(self, *, spans: bool = False, sample_ns: int = 0) -> None:
        """Keeps, from now on, what pictures need.

        Args:
            spans: each step and transmission.
            sample_ns: nanoseconds between samples of all tiers, but at most one between two events;
                0 takes none.
        """

    def spans(self) -> list[tuple[int, str | None, int, int, int]]:
        """`(machine, lane, start_ns, end_ns, bytes)` by machine; the lane of a step is None.

        A lane named `peers` carries towards its machine.
        """

    def samples(self) -> list[tuple[int, int, list[int]]]:
        """`(at_ns, machine, blocks resident per tier)`, before the events of that time."""

    def log(self, machine: int) -> list[tuple[Any, ...]]:
        """The calls of a machine's manager, in order, each with its name first.

        `("acquire", tokens, keep, reserve, layerwise, session, lease, now)`, where lease 0 is a
        NoSpaceError; `("moves", rows)`, a row being id, kind, lease, src, dst, src_slot, dst_slot,
        layer_lo, layer_hi, after; `("complete", ids, now)`; `("commit", lease, tokens, now)`;
        `("release", lease, now)`; `("mark", tokens, tier, skip, first, ready, fits, now)`, where
        `fits` is False for a NoSpaceError; `("pin", blocks, tier, pin, now)`;
        `("unpin", pin, now)`; `("prefetch", tokens, now)`, a hint.
        """

@final
class Transmission:
    """When a transmission on a lane ends: layer `i` is there at `first + i * per_layer`.

    Attributes:
        end: when the last layer is there, in nanoseconds.
        first: when the first layer is there, in nanoseconds.
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
