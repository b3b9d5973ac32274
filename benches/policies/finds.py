"""Leading blocks that an online policy finds of each prompt of a trace, and rows of both halves.

Constants of baselines are chosen on the first halves, where the mean cost saved over the traces is
highest (`CHOSEN`), and shown on the second ones. A room is the one in the middle of its trace's.
Invariant: finds depend on trace, room and policy alone. Cost: seconds each, once per process.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

from benches.policies.cells import BALANCED, HITS, Row, objective_of, whole
from benches.policies.online import CONSTANTS, NAMES, baseline, named
from benches.policies.traces import Source, rooms_of, trace_of
from kvtrie import Tier
from kvtrie._kvtrie import Simulation
from kvtrie.sim.replay import open_manager, prompt_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.sim.readers.rows import Record, RowWithMore

FIRST, SECOND = "first half", "second half"
CORE = ("lru", "learned", "learned" + BALANCED, "learned" + HITS)
CHOSEN = {"RandomCompute": 0.5, "LRU, demotion": 0.6, "S3FIFO": 0.3, "ARC": 0.0}
ONLINE = (*CORE, *(named(policy, constant) for policy, constant in CHOSEN.items()))


def middle(source: Source) -> int:
    """The room in the middle of a trace's."""
    rooms = rooms_of(source)
    return rooms[len(rooms) // 2]


@cache
def finds(source: Source, room: int, policy: str) -> list[int]:
    """Leading blocks found of each prompt, by one of our policies or a baseline."""
    requests = trace_of(source)
    if policy in NAMES:
        paths = [whole(request).blocks.tolist() for request in requests]
        prompts = [len(request.blocks) for request in requests]
        return baseline(policy, paths, prompts, room, source.block_tokens)
    manager = open_manager(
        [Tier("gpu", blocks=room)],
        policy=policy.partition(",")[0],
        block_tokens=source.block_tokens,
        objective=objective_of(policy),
    )
    found: list[int] = []

    def rows() -> Iterator[RowWithMore]:
        for request in requests:
            answer = request.blocks[:0] if request.answer is None else request.answer
            more = {"answer": answer}
            yield request.at, request.blocks, request.input_tokens, 0, None, more

    def on_record(record: Record) -> None:
        found.append(0 if record[3] is None else record[7][1])

    simulation = Simulation.over(manager, load="all", running=source.running)
    simulation.run(rows(), on_record)
    return found


def halves(source: Source, policy: str) -> list[Row]:
    """Cost saved and blocks found in per cent of each half of a trace's requests."""
    room, requests = middle(source), trace_of(source)
    found = finds(source, room, policy)
    rows: list[Row] = []
    cut = len(requests) // 2
    for name, part in ((FIRST, slice(cut)), (SECOND, slice(cut, None))):
        asked = [len(request.blocks) for request in requests[part]]
        counts = list(zip(found[part], asked, strict=True))
        costs = [tuple(prompt_cost(n, source.block_tokens) for n in pair) for pair in counts]
        cost, hits = (100 * share_of(pairs) for pairs in (costs, counts))
        rows.append(Row(source.name, source.seed, room, name, 1, policy, cost, hits))
    return rows


def share_of(pairs: Iterable[tuple[float, ...]]) -> float:
    """The sum of the first figures, per that of the second ones."""
    some, all_ = (sum(column) for column in zip(*pairs, strict=True))
    return some / all_


def best_constants(rows: Iterable[Row]) -> dict[str, float]:
    """Of each baseline the constant that saves most cost over the first halves of the traces."""
    saved: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row.structure == FIRST and row.policy in NAMES:
            policy, constant = NAMES[row.policy]
            saved.setdefault(policy, {}).setdefault(constant, []).append(row.cost_saved or 0.0)
    return {
        policy: max(each, key=lambda constant: fmean(each[constant]))
        for policy, each in saved.items()
        if set(each) == set(CONSTANTS[policy])
    }
