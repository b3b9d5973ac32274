"""Search: counts the leading blocks of a sequence in a store.

Invariant: the store is queried only for names without a usable belief, and for no batch after the
first missing block.
Cost: a call per 64, 128, … 1024 blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtrie.tiers.remote.beliefs import Beliefs

__all__ = ["Answer", "Found", "known_blocks", "least", "search"]

Answer: TypeAlias = Literal["ok", "missing", "refuted", "late"]

_LEAST_FIRST: tuple[Answer, ...] = ("late", "refuted", "missing", "ok")
_FIRST_BATCH = 64  # blocks of the first query, because most prompts differ early
_MOST_BATCH = 1024


class Found(NamedTuple):
    """Answer of a store about the blocks of a sequence.

    Attributes:
        blocks: leading blocks in the store.
        queried: number of queried names.
        refuted: blocks believed to be present but missing.
        late: names without an answer by the deadline.
    """

    blocks: int
    queried: int
    refuted: int
    late: int


def search(
    rows: Sequence[Sequence[bytes]],
    beliefs: Beliefs,
    ask: Callable[[Sequence[bytes]], Mapping[bytes, Answer]],
) -> Found:
    """Count the leading blocks in the store, querying names without a usable belief.

    Args:
        rows: the names of each block, one per rank. A block counts only with all of them.
        beliefs: the beliefs of this process.
        ask: queries the store and returns its answer for each name.
    """
    blocks, queried, refuted, late, size = 0, 0, 0, 0, _FIRST_BATCH
    while blocks < len(rows):
        batch = rows[blocks : blocks + size]
        kinds = {name: beliefs.kind(name) for row in batch for name in row}
        usable = _leading(all(kinds[name] != "refuted" for name in row) for row in batch)
        unknown = [name for row in batch[:usable] for name in row if kinds[name] == "unknown"]
        answers = ask(unknown)
        stored = {name for name in kinds if kinds[name] in {"confirmed", "reported"}}
        stored.update(name for name, answer in answers.items() if answer == "ok")
        count = _leading(stored.issuperset(row) for row in batch[:usable])
        queried += len(unknown)
        refuted += sum(answer == "refuted" for answer in answers.values())
        late += sum(answer == "late" for answer in answers.values())
        blocks += count
        if count < len(batch):
            refuted += count == usable
            break
        size = min(2 * size, _MOST_BATCH)
    return Found(blocks, queried, refuted, late)


def least(answers: Iterable[Answer]) -> Answer:
    """Return the answer for a block from the answers for its parts, all of them required."""
    return min(answers, key=_LEAST_FIRST.index)


def known_blocks(rows: Sequence[Sequence[bytes]], beliefs: Beliefs) -> Found:
    """Count the leading blocks written or read by this process."""
    return Found(_leading(all(map(beliefs.seen, row)) for row in rows), 0, 0, 0)


def _leading(flags: Iterable[bool]) -> int:
    """Return the number of leading true flags."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
