"""Admission: acquires a lease for each prompt of a batch.

Invariant: after an exception, all acquired leases are in `rows`. Cost: a few calls into the manager
per row, and the time limit for a shared store.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvtrie.engines.transformers.cache_misses import count_row, explain_prompt
from kvtrie.engines.transformers.rows import Row, with_retry
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Lease, Scope
    from kvtrie.engines.server.why import Explained
    from kvtrie.engines.transformers.states import States
    from kvtrie.transfer import Executor

__all__ = ["LOOKUP_S", "admit", "ask_store", "common_column", "unpadded"]

LOOKUP_S = 0.05
"""Default time limit in seconds for a shared store when a cache is opened."""

_NS = 1_000_000_000


def unpadded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[NDArray[np.int64]]:
    """Return the rows of a batch without the padding on their left.

    Raises:
        ConfigError: no rows of tokens, or padding that is not on the left.
    """
    if input_ids.ndim != 2 or not input_ids.numel():  # noqa: PLR2004 - rows and columns
        raise ConfigError(f"input_ids are {tuple(input_ids.shape)}: rows of tokens are wanted")
    rows = list(input_ids.cpu().numpy())
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    seen = attention_mask.cpu().numpy() != 0
    if (np.diff(seen.astype(np.int8), axis=1) < 0).any() or not seen[:, -1].all():
        raise ConfigError("padding belongs on the left: every row ends with a token")
    return [row[mask] for row, mask in zip(rows, seen, strict=True)]


def ask_store(
    executor: Executor, prompts: Sequence[NDArray[np.int64]], scope: Scope | None, seconds: float
) -> None:
    """Prefetch prompts from a shared store, within a time limit. Does nothing without a store.

    Args:
        executor: carries out the moves of the tiers.
        prompts: tokens of each prompt.
        scope: the scope of their blocks.
        seconds: time limit for all prompts together.
    """
    end = executor.clock() + int(seconds * _NS)
    for prompt in prompts:
        left = end - executor.clock()
        if left <= 0:
            return
        executor.prefetch(prompt, scope=scope, deadline_s=left / _NS)


def admit(
    executor: Executor,
    prompts: Sequence[NDArray[np.int64]],
    rows: list[Row],
    *,
    columns: int,
    scope: Scope | None,
    sessions: Sequence[str] | None,
    reserve: int,
    load: Literal["plan", "all"],
    layerwise: bool,
    alone: bool,
) -> None:
    """Acquire a lease per prompt, with one retry each, and count the computed tokens.

    Args:
        executor: carries out the moves of the manager.
        prompts: the tokens of each row.
        rows: receives each row as soon as it has a lease.
        columns: columns of the batch, left padding included.
        scope: the scope of the blocks.
        sessions: the conversation of each row.
        reserve: tokens after each prompt to make room for.
        load: passed to `BlockManager.acquire`.
        layerwise: whether the loads wait for an `Arrival`.
        alone: whether each row is computed from the end of its match. Otherwise all rows are
            computed from the end of the shortest match.

    Raises:
        ConfigError: the number of sessions differs from the number of prompts.
        NoSpaceError: no room for the prompts and `reserve`.
    """
    if sessions is not None and len(sessions) != len(prompts):
        raise ConfigError(f"{len(sessions)} sessions given for {len(prompts)} prompts")
    explained: list[Explained | None] = []
    for at, prompt in enumerate(prompts):
        session = None if sessions is None else sessions[at]
        explained.append(explain_prompt(executor, prompt, scope, session))
        ask = partial(
            executor.manager.acquire,
            prompt,
            scope=scope,
            session=session,
            reserve=reserve,
            load=load,
            layerwise=layerwise,
        )
        lease = with_retry(executor, partial(_claimed, executor, ask) if layerwise else ask)
        rows.append(Row(lease, columns - len(prompt), prompt))
    past = 0 if alone else min(row.pad + row.lease.matched for row in rows)
    for one, row in zip(explained, rows, strict=True):
        start = row.lease.matched if alone else max(0, past - row.pad)
        count_row(executor, one, row.lease, start, len(row.tokens))


def _claimed(executor: Executor, ask: Callable[..., Lease], *, now: int) -> Lease:
    """Acquire a lease with loads held back for an `Arrival`."""
    return executor.claims.acquire(partial(ask, now=now))


def common_column(rows: Sequence[Row], matched: Sequence[int], states: States | None) -> int:
    """Return the column up to which opening computes rows with windows or states.

    It is the last resume point of the prompts, or without states the end of the longest match. It
    is at least the padding of each row. If passes over states are limited to one token, it is the
    last column.

    Args:
        rows: the rows.
        matched: matched tokens of each row.
        states: recurrent states of the rows, None for a model without states.
    """
    if states is not None and states.stepwise:
        return rows[0].pad + len(rows[0].tokens) - 1
    goals = {
        row.pad + (states.goal(row, tokens) if states else tokens)
        for row, tokens in zip(rows, matched, strict=True)
    }
    return max(goals) if len(goals) == 1 else max(goals.union(row.pad for row in rows))
