"""Borders: ends of resumable prefixes, in models with several groups of layers.

A request can resume after a block if each group after the first has its blocks for this border: the
blocks of a window, or a state. A router counts blocks of the first group, so a block counts only
if it precedes a complete border.
Invariant: a block is covered if a border is complete at its end or at the end of a later block of
its sequence. Cost: a node per block stored or with a stored descendant. A change checks the nearby
borders, by their needed blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Needs = Callable[[int], list[tuple[tuple[int, int], tuple[int, int]]]]

__all__ = ["Borders"]


class _Node:
    """A block: its neighbours and its residency.

    Attributes:
        above: the block before it, or None for a first block and while unknown.
        below: the blocks after it.
        depth: the number of blocks before it, or None while unknown.
        there: by group, a bit mask of the tiers with all of its layers.
        complete: whether a request can resume after it.
        covers: the number of covered children, plus 1 if it is complete.
    """

    __slots__ = ("above", "below", "complete", "covers", "depth", "key", "tiers")

    def __init__(self, key: bytes) -> None:
        self.key, self.complete, self.covers = key, False, 0
        self.above: _Node | None = None
        self.depth: int | None = None
        self.below: set[_Node] = set()
        self.tiers: dict[int, int] = {}

    def note(self, tier: int, group: int, *, resident: bool) -> bool:
        """Record a group on a tier. Return whether the group came to the tiers or left them."""
        before = self.tiers.get(group, 0)
        after = before | 1 << tier if resident else before & ~(1 << tier)
        if after:
            self.tiers[group] = after
        else:
            self.tiers.pop(group, None)
        return bool(before) != bool(after)


class Borders:
    """The borders of all sequences.

    Args:
        needs: as `BlockManager.resume_needs`.
    """

    def __init__(self, needs: Needs) -> None:
        self.needs, self._nodes = needs, dict[bytes, _Node]()

    def is_covered(self, key: bytes) -> bool:
        """Return whether a request can resume after this block or a later block."""
        return key in self._nodes and self._nodes[key].covers > 0

    def change(
        self, place: tuple[int, int, bytes], parent: bytes, *, resident: bool, first: bool
    ) -> list[bytes]:
        """Record whether a whole block is on a tier.

        Args:
            place: its tier, its group and its key.
            parent: the key of the block before it.
            resident: whether the block is on the tier.
            first: whether `parent` is no block.

        Returns:
            Keys of the newly covered or no longer covered blocks, parents first.
        """
        tier, group, key = place
        node = self._node(key)
        placed = node.depth is not None
        if not placed and node.above is None:
            self._link(node, parent, first=first)
        changed_tiers = node.note(tier, group, resident=resident)
        changed = self._update_borders(node) if changed_tiers or not placed else []
        self._forget(node)
        return changed

    def begin(self, key: bytes) -> list[bytes]:
        """Make a block the first of its sequence. Return as `change`."""
        node = self._nodes.get(key)
        if node is None or node.depth is not None:
            return []
        above, node.above, node.depth = node.above, None, 0
        if above is not None:
            above.below.discard(node)
            self._forget(above)
        return self._update_borders(node)

    def _link(self, node: _Node, parent: bytes, *, first: bool) -> None:
        node.above = None if first else self._node(parent)
        if node.above is None:
            node.depth = 0
        else:
            node.depth = None if node.above.depth is None else node.above.depth + 1
            node.above.below.add(node)

    def _node(self, key: bytes) -> _Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        return node

    def _update_borders(self, node: _Node) -> list[bytes]:
        """Check the borders near a block, its own border first."""
        changed: list[bytes] = []
        pending = [node]
        while pending:
            one = pending.pop()
            if one.depth is None and one.above is not None and one.above.depth is not None:
                one.depth = one.above.depth + 1
            if one.depth is None:
                continue
            complete = self._is_complete(one)
            if complete != one.complete:
                one.complete = complete
                changed += self._cover(one, 1 if complete else -1)
            if one.below:
                wanted = self._wanted(one.depth + 2)
                needed = any(first <= (node.depth or 0) for _, first, _ in wanted)
                pending += [each for each in one.below if needed or each.depth is None]
        return changed

    def _wanted(self, border: int) -> list[tuple[int, int, int]]:
        """Return the groups needed by a border, with first block and last block plus 1."""
        groups = enumerate(self.needs(border), 1)
        return [(group, *each) for group, ranges in groups for each in ranges if each[0] < each[1]]

    def _is_complete(self, node: _Node) -> bool:
        if 0 not in node.tiers:
            return False
        wanted = self._wanted((node.depth or 0) + 1)
        lowest = min((first for _, first, _ in wanted), default=0)
        one: _Node | None = node
        while one is not None and wanted and (at := one.depth or 0) >= lowest:
            for group, first, end in wanted:
                if first <= at < end and group not in one.tiers:
                    return False
            one = one.above
        return True

    def _cover(self, node: _Node | None, step: int) -> list[bytes]:
        """Add a border to the counts of its block and of earlier blocks, or remove it."""
        changed: list[bytes] = []
        while node is not None:
            node.covers += step
            if node.covers != max(0, step):  # covered both before and after
                break
            changed.append(node.key)
            node = node.above
        return changed[::-1]

    def _forget(self, node: _Node | None) -> None:
        """Drop a block on no tier and without later blocks."""
        while node is not None and not node.tiers and not node.below:
            del self._nodes[node.key]
            above = node.above
            if above is not None:
                above.below.discard(node)
            node = above
