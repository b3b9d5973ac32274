"""ResumePoints: the resumable borders of a sequence in a model of several groups of layers.

Invariant: the plan's bytes are the tier's bytes, and its first group keeps all tokens. Cost:
arithmetic on a handful of integers, once per manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import GroupPages
from kvtrie.settings.argument import put, whole

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["ResumePoints", "has_groups"]

_Plan: TypeAlias = tuple[
    list[tuple[str, int, int, int, int]], int, list[tuple[int, int, list[int]]], tuple[int, int]
]
_MOST_BLOCKS = 2**32 - 2


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """The points of a sequence at which a model with windows or states can resume.

    A point holds the windows and states for computing the next token. Points are at the end of
    prompts and of answers, where a repeated prompt resumes, and where a second prompt leaves a
    known path. A model with a single group of full attention resumes after any block: points change
    nothing there.

    Attributes:
        newest: maximum number of points at ends of a path. Points at branches and at ends of
            repeated prompts are kept in addition.
        every: tokens between two points, a multiple of a block. All these points are kept, and no
            further points. None has points at ends and branches.

    Raises:
        ConfigError: an invalid number.
    """

    newest: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        put(self, newest=whole("newest of resume points", self.newest, 1, 2**32 - 1))
        if self.every is not None:
            put(self, every=whole("every of resume points", self.every, 1, 2**63 - 1))

    def _plan(self, model: ModelShape, tiers: tuple[Tier, ...], block_tokens: int) -> _Plan | None:
        """Return the groups in the manager's format.

        Args:
            model: its groups are kept apart.
            tiers: the tiers, each with its bytes shared by all groups.
            block_tokens: tokens of a block, each with its KV.

        Returns:
            Kind, window, sinks, bytes of a slot and layers of each group. Bytes of a layer of the
            first. For each tier the maximum number of blocks of the first group, the bytes, and the
            bytes of a slot of each group. Newest, and blocks between points. None if groups are not
            kept apart, see `has_groups`.

        Raises:
            ConfigError: a single group with windows or states, a room without bytes, or points
                within a block.
        """
        if not has_groups(model, self):
            return None
        slots = [model.block_bytes(block_tokens, at) for at in range(len(model.groups))]
        rows = zip(model.groups, slots, strict=True)
        rooms = [GroupPages.of(model, tier, block_tokens) for tier in tiers]
        layers = len(model.groups[0].layers)
        every = self.every or 0
        if every % block_tokens:
            raise ConfigError(
                f"resume points every {every} tokens, a multiple of a block of {block_tokens} "
                "tokens wanted"
            )
        return (
            [(one.kind, one.window, one.sinks, slot, len(one.layers)) for one, slot in rows],
            max(1, slots[0] // layers),
            [
                (min(max(1, room.bytes // room.slots[0]), _MOST_BLOCKS), room.bytes, [*room.slots])
                for room in rooms
            ],
            (self.newest, every // block_tokens),
        )


def has_groups(model: ModelShape, resume: ResumePoints | None) -> bool:
    """Return whether groups of layers are kept apart: with resume points and several groups.

    Raises:
        ConfigError: resume points for a single group without full attention.
    """
    if resume is None or len(model.groups) > 1:
        return resume is not None
    if model.groups and model.groups[0].kind != "full":
        raise ConfigError(
            f"resume points are for models with a group of full attention, this one has one group "
            f"of kind {model.groups[0].kind!r}"
        )
    return False
