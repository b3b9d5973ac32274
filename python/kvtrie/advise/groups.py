"""Groups: the groups of layers published by a hybrid server, and their use in a replay.

An engine may divide the layers of a kind into several groups of equal size, as vLLM does, so its
groups are matched to the model's groups by kind and window. A played block ends at a block border
of every group: its size is the least common multiple of the groups' block sizes.
Invariant: groups are played apart only if the server's groups match the model's. Cost: the names of
the blocks in the GPU's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.advise.wire import MOST_SIZE, Hash
from kvtrie.errors import ConfigError
from kvtrie.printable import printable
from kvtrie.settings.resume import ResumePoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.advise.wire import Batch, Part
    from kvtrie.model.layer_group import LayerGroup
    from kvtrie.model.shape import ModelShape
    from kvtrie.sim.trace import TraceRequest

__all__ = ["Grouping", "PublishedGroup", "PublishedGroups", "grouping", "of_trace"]

_KINDS = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "sliding",
    "sliding_window_mla": "sliding",
    "chunked_local_attention": "chunked",
    "mamba": "state",
}
_NO_GROUP = "no group with full attention"


@dataclass(slots=True)
class PublishedGroup:
    """A published group of layers.

    Attributes:
        kind: the engine's name of its kind. Empty until a block was stored.
        window: tokens of a sliding window, if published.
        size: tokens of a block.
        blocks_on_gpu: names of its blocks in the GPU's memory.
    """

    kind: str = ""
    window: int | None = None
    size: int = 0
    blocks_on_gpu: set[Hash] = field(default_factory=set[Hash])

    def __str__(self) -> str:
        window = "" if self.window is None else f" of {self.window} tokens"
        return f"{self.kind}{window} in blocks of {self.size} tokens"


class PublishedGroups:
    """All groups of a server except the requests' group.

    Attributes:
        groups: the groups by the engine's numbers.
        events: events of these groups.
        resident: maximum number of blocks of all groups in the GPU's memory at a time.
    """

    def __init__(self) -> None:
        self.groups: dict[int, PublishedGroup] = {}
        self.events = self.resident = 0

    def add(self, batch: Batch, blocks_on_gpu: int) -> None:
        """Add the events of a step.

        Args:
            batch: the events.
            blocks_on_gpu: number of blocks of the requests' group in the GPU's memory.

        Raises:
            ConfigError: a group changed its kind, window or block size.
        """
        if batch.cleared:
            for group in self.groups.values():
                group.blocks_on_gpu.clear()
        for part in batch.parts:
            self._add(batch.number, part)
        self.events += len(batch.parts)
        others = sum(len(one.blocks_on_gpu) for one in self.several())
        self.resident = max(self.resident, blocks_on_gpu + others)

    def several(self) -> list[PublishedGroup]:
        """Return the groups with stored blocks."""
        return [one for _, one in sorted(self.groups.items()) if one.kind]

    def _add(self, number: int, part: Part) -> None:
        group = self.groups.setdefault(part.group, PublishedGroup())
        group.blocks_on_gpu.difference_update(part.removed)
        if not part.size:
            return
        if not group.kind:
            group.kind, group.window, group.size = part.kind or "unknown", part.window, part.size
        # The partial last block of a prompt is published as a block of fewer tokens.
        if part.size < group.size and not group.size % part.size:
            return
        same = (part.kind or "unknown", part.window, part.size)
        if same != (group.kind, group.window, group.size):
            before, now = (printable(one) for one in (group, PublishedGroup(*same)))
            raise ConfigError(
                f"sequence number {number} has group {part.group} as {now}, before it was {before}"
            )
        group.blocks_on_gpu.update(part.stored)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups and block sizes for a replay.

    Attributes:
        model: the shape.
        block_tokens: tokens of a played block.
        times: blocks of the rebuilt requests per played block.
        resume: resumable borders. None if all layers keep all tokens.
        groups: the server's groups except the first. Empty if groups are not played apart.
        page: bytes of a block of the engine, shared by all its groups.
    """

    model: ModelShape
    block_tokens: int
    times: int = 1
    resume: ResumePoints | None = None
    groups: tuple[PublishedGroup, ...] = ()
    page: int = 0

    def requests(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield requests in played blocks, with unchanged prompt tokens."""
        for request in requests:
            yield request if self.times == 1 else self._joined(request)

    def _joined(self, request: TraceRequest) -> TraceRequest:
        # The last of several blocks names them all, since a name identifies a prefix.
        answer = request.blocks[:0] if request.answer is None else request.answer
        path = np.concatenate([request.blocks, answer])[self.times - 1 :: self.times]
        whole = len(request.blocks) // self.times
        rest = path[whole:]
        return replace(request, blocks=path[:whole], answer=rest if len(rest) else None)


def of_trace(model: ModelShape, block_tokens: int) -> Grouping:
    """Return the grouping of a trace: the groups of the model."""
    resume = ResumePoints() if len(model.groups) > 1 else None
    return Grouping(model, block_tokens, resume=resume)


def grouping(model: ModelShape, published: PublishedGroups, size: int) -> Grouping:
    """Return the grouping of a server's requests.

    Args:
        model: the server's model.
        published: the server's remaining groups.
        size: tokens of a block of the requests' group.

    Raises:
        ConfigError: groups different from the model's, or blocks without a common border within
            `MOST_SIZE` tokens.
    """
    found = published.several()
    if all(_KINDS.get(one.kind) == "full" for one in found):
        return Grouping(model, size)
    if not model.groups or model.groups[0].kind != "full":
        raise ConfigError(f"{_said(found)}; {_of(model)}: a shape with these groups wanted")
    of_kind = dict.fromkeys(range(len(model.groups)), 0)
    of_kind[0] = 1
    sizes = {0: size}
    for one in found:
        at = _place(model, one, found)
        of_kind[at] += 1
        sizes[at] = one.size
    border = math.lcm(size, *(one.size for one in found))
    if border > MOST_SIZE:
        raise ConfigError(
            f"the server's groups have blocks of {sorted({size, *(one.size for one in found)})} "
            f"tokens, which share a border every {border} tokens: at most {MOST_SIZE} wanted"
        )
    page = max(
        -(-model.block_bytes(sizes[at], at) // count) for at, count in of_kind.items() if count
    )
    return Grouping(model, border, border // size, ResumePoints(), tuple(found), page)


def refuse_without_requests(published: PublishedGroups) -> None:
    """Refuse a server with only windows or states.

    Raises:
        ConfigError: blocks were stored, but none of a group with full attention.
    """
    if found := published.several():
        raise ConfigError(f"{_said(found)}, and {_NO_GROUP}, whose blocks name whole prompts")


def _place(model: ModelShape, one: PublishedGroup, found: list[PublishedGroup]) -> int:
    """Return the model's group for a server's group."""
    kind = _KINDS.get(one.kind)
    for at, group in enumerate(model.groups):
        window = one.window is None or kind != "sliding" or one.window == group.window
        if group.kind == kind and window:
            return at
    raise ConfigError(f"{_said(found)}; {_of(model)}: the model of the server wanted")


def _said(found: list[PublishedGroup]) -> str:
    names = sorted({printable(one, in_ascii=True) for one in found})
    return f"the server publishes groups of {', '.join(names)}"


def _of(model: ModelShape) -> str:
    return f"the model has {', '.join(map(_named, model.groups)) or 'full attention alone'}"


def _named(group: LayerGroup) -> str:
    return f"{group.kind} of {group.window} tokens" if group.window else group.kind
