"""KV events of blocks on host and disk, published by vLLM together with its own.

Events have vLLM's hashes of the blocks, so a router can continue the chain of a prompt from the GPU
to the tiers below. They name the group of layers like vLLM's own events: a router counts the blocks
of groups with full attention. They set neither locality nor ownership, because routers drop events
with these fields. Invariant: consecutive blocks of a sequence are in the same event. Cost: an
object per run of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtrie.engines.vllm.changes import Extra

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
except ImportError:  # before 0.31 keys already have the form of events

    def to_event_extra_keys(
        extra_keys: Iterable[tuple[Any, ...] | None] | None,
    ) -> list[tuple[Any, ...] | None] | None:
        """Return the keys."""
        return list(extra_keys) if extra_keys else None


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtrie.engines.vllm.changes import Change
    from kvtrie.engines.vllm.model import ServedGroup, ServedModel

__all__ = ["EngineResets", "EventGroup", "VllmNaming", "events_of"]

_MEDIUMS = (None, MEDIUM_CPU, MEDIUM_STORAGE)


class VllmNaming:
    """vLLM's hashes of blocks.

    Args:
        algorithm: the name of vLLM's hash function.
        hashes: the number of hashes of a block.
    """

    def __init__(self, algorithm: str, hashes: int = 1) -> None:
        self._hash, self._hashes = get_hash_fn_by_name(algorithm), hashes

    def hash(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Return the concatenated hashes of a block of plain tokens."""
        last: Any = None if parent is None else _split(parent, self._hashes)[-1]
        found: list[bytes] = []
        for part in _parts(range(len(tokens)), self._hashes):
            last = hash_block_tokens(self._hash, last, tokens[part.start : part.stop])
            found.append(last)
        return b"".join(found)

    def facts(self, request: Request, start: int, end: int) -> Extra:
        """Return adapter, salt and images of a request's block."""
        found = [
            generate_block_hash_extra_keys(request, part.start, part.stop, 0)[0]
            for part in _parts(range(start, end), self._hashes)
        ]
        if not any(found):
            return Extra()
        adapter, keys = request.lora_request, tuple(to_event_extra_keys(found) or ())
        if adapter is None:
            return Extra(keys=keys)
        return Extra(adapter.lora_int_id, adapter.lora_name, keys)


class EventGroup(NamedTuple):
    """The group of layers of an event, with vLLM's names of the fields.

    Attributes:
        group_idx: vLLM's number of the group.
        kv_cache_spec_kind: vLLM's name of the kind of its layers.
        kv_cache_spec_sliding_window: tokens of its window, or None without a window.
        block_size: tokens of a block.
    """

    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None
    block_size: int

    @classmethod
    def of(cls, group: ServedGroup, caches: KVCacheConfig) -> Self:
        """Return the event group of a served group."""
        spec = caches.kv_cache_groups[group.number].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        return cls(group.number, kind, get_kv_cache_spec_sliding_window(spec), spec.block_size)


class EngineResets:
    """Detects resets of vLLM's own prefix cache: vLLM does not report them to connectors.

    vLLM publishes `AllBlocksCleared` then, and readers forget the blocks of all mediums.

    Args:
        pool: vLLM's blocks on the GPU. A reset replaces its map of hashes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool, self._known = pool, pool.cached_block_hash_to_block

    @property
    def pending(self) -> bool:
        """Whether there was a reset since the last `take`."""
        return self._pool.cached_block_hash_to_block is not self._known

    def take(self) -> bool:
        """Return whether there was a reset since the last call."""
        pending, self._known = self.pending, self._pool.cached_block_hash_to_block
        return pending


def events_of(
    changes: Iterable[Change], model: ServedModel, groups: Sequence[EventGroup]
) -> Iterator[Any]:
    """Yield vLLM's events of stored and removed blocks, in units of vLLM's blocks.

    Args:
        changes: blocks stored or removed, from the scheduler.
        model: the served KV.
        groups: its groups of layers.
    """
    run: list[Change] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            yield _event(run, model, groups[run[0].group])
            run = []
        run.append(change)
    if run:
        yield _event(run, model, groups[run[0].group])


def _continues(last: Change, change: Change) -> bool:
    alike = last[:3] == change[:3] and last.extra[:2] == change.extra[:2]
    return alike and (not change.stored or change.parent == last.hash)


def _split(hashes: bytes, count: int) -> list[bytes]:
    """Split concatenated hashes."""
    return [hashes[part.start : part.stop] for part in _parts(range(len(hashes)), count)]


def _parts(whole: range, count: int) -> list[range]:
    """Return equal parts of a range."""
    size = len(whole) // count
    return [range(at, at + size) for at in range(whole.start, whole.stop, size)]


def _event(run: list[Change], model: ServedModel, group: EventGroup) -> Any:  # noqa: ANN401 - vLLM's own
    # A block of the group is named by its last hash.
    first, step = run[0], model.hashes * group.block_size // model.block_tokens
    names = [_split(each.hash, model.hashes)[step - 1 :: step] for each in run]
    hashes = [maybe_convert_block_hash(cast("Any", name)) for each in names for name in each]
    if not first.stored:
        return BlockRemoved(
            block_hashes=hashes, medium=_MEDIUMS[first.tier], group_idx=group.group_idx
        )
    parent: Any = None
    if first.parent is not None:
        parent = maybe_convert_block_hash(cast("Any", _split(first.parent, model.hashes)[-1]))
    keys = [key for each in run for key in _keys(each.extra.keys, len(names[0]))]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=[token for each in run for token in each.tokens],
        lora_id=first.extra.lora_id,
        medium=_MEDIUMS[first.tier],
        lora_name=first.extra.lora_name,
        extra_keys=keys if any(keys) else None,
        **group._asdict(),
    )


def _keys(each: tuple[tuple[Any, ...] | None, ...], blocks: int) -> list[tuple[Any, ...] | None]:
    """Return the extra keys of blocks of a group, merged over their hashes."""
    if not each:
        return [None] * blocks
    return [
        tuple(dict.fromkeys(key for keys in each[part.start : part.stop] for key in keys or ()))
        or None
        for part in _parts(range(len(each)), blocks)
    ]
