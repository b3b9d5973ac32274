"""Count the computed prompt tokens of `KvtrieCache` by cause, per executor.

Invariant: each token computed by a row is counted once, with its cause before the row acquired its
lease. Cost: two lookups per row, and the cost of `MissCounter`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvtrie.engines.server.why import Admitted, MissCounter
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie import Lease
    from kvtrie.engines.server.why import Explained
    from kvtrie.transfer import Executor

__all__ = ["count_row", "counter_of", "explain_prompt"]

_COUNTERS: WeakKeyDictionary[Executor, MissCounter] = WeakKeyDictionary()
_LOCK = threading.Lock()


def counter_of(executor: Executor) -> MissCounter:
    """Return the counter for an executor's `missed_tokens`."""
    with _LOCK:
        found = _COUNTERS.get(executor)
        if found is None:
            found = MissCounter(executor.manager, tokens=executor.missed_tokens)
            _COUNTERS[executor] = found
        return found


def explain_prompt(
    executor: Executor, prompt: NDArray[np.int64], scope: Scope | None, session: str | None
) -> Explained | None:
    """Find the cause of a prompt's misses, before its lease is acquired.

    Args:
        executor: the executor of the tiers.
        prompt: the tokens.
        scope: the scope of the blocks.
        session: the conversation of the prompt.
    """
    now = executor.clock()
    found = executor.manager.lookup(prompt, now=now, scope=scope).tokens
    request = Admitted("", prompt.astype(np.uint32), scope or Scope(), session)
    return counter_of(executor).explain(request, len(prompt) - found, now)


def count_row(
    executor: Executor, explained: Explained | None, lease: Lease, start: int, end: int
) -> None:
    """Count the computed tokens of a row: all from `start` on, and the holes before it.

    Args:
        executor: the executor of the tiers.
        explained: the result of `explain_prompt`.
        lease: the lease of the row.
        start: the first token of the model's first pass.
        end: number of tokens of the prompt.
    """
    holes = lease.plan.recompute()
    holes = holes[holes < start]
    spans = [
        (int(part[0]), int(part[-1]) + 1)
        for part in np.split(holes, np.flatnonzero(np.diff(holes) > 1) + 1)
        if len(part)
    ]
    counter_of(executor).count(explained, [*spans, (start, end)])
