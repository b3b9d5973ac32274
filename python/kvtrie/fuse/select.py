"""Selection: the choice of reused tokens to recompute, a function per way.

Candidates are the tokens with KV depending on the context. A way ranks them by the error expected
without recomputation and takes the first `count`. Deviations are ranked, never compared with a
threshold: for V of a trained model they are a few thousandths of its squares at the first layers
and a fifth at the middle layers.
Invariant: the chosen candidates are distinct and at most `count`. Cost: none for `first`, `random`,
`all` and `none`, full lower layers for `keys` and `values`, a pass of the query's tokens for
`question`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtrie.errors import ConfigError
from kvtrie.fuse.deviation import DeviationProfile
from kvtrie.settings.argument import text

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SELECTIONS", "Candidates", "Select", "selection"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Input of a selection.

    Attributes:
        positions: int64 `(m,)`, ascending: the candidates' positions in the sequence.
        chunks: int64 `(m,)`: index of each candidate's chunk in the context.
        within: int64 `(m,)`: each candidate's position in its chunk.
        deviation: returns, for "keys" or "values", fp32 `(m,)`: per candidate the sum of squared
            differences of fresh and reused K or V at the chosen layer, with all lower layers
            computed in full (CacheBlend, section 4.3).
        attention: returns fp32 `(m,)`: the query's attention to each candidate over the reused
            cache, summed over the chosen layers, query heads and the query's tokens.
        generator: generator of random choices.
        first: position of the first chunk's first token.
    """

    positions: torch.Tensor
    chunks: torch.Tensor
    within: torch.Tensor
    deviation: Callable[[str], torch.Tensor]
    attention: Callable[[], torch.Tensor]
    generator: torch.Generator
    first: int = 0

    def __len__(self) -> int:
        return len(self.positions)


Select: TypeAlias = "Callable[[Candidates, int], torch.Tensor]"
"""From candidates and a count to at most `count` indices of candidates, int64, best first."""


def none(among: Candidates, count: int) -> torch.Tensor:  # noqa: ARG001 - as all ways
    """Return no token: plain reuse."""
    return among.positions.new_empty(0)


def every(among: Candidates, count: int) -> torch.Tensor:  # noqa: ARG001 - as all ways
    """Return all tokens, at any ratio: a full prefill of all but the exact chunks."""
    return torch.arange(len(among), device=among.positions.device)


def random(among: Candidates, count: int) -> torch.Tensor:
    """Return tokens drawn at random, each with equal probability."""
    drawn = torch.randperm(len(among), generator=among.generator)
    return drawn[:count].to(among.positions.device)


def first(among: Candidates, count: int) -> torch.Tensor:
    """Return the first tokens of each chunk, the same number of each long enough chunk."""
    return torch.argsort(among.within, stable=True)[:count]


def keys(among: Candidates, count: int) -> torch.Tensor:
    """Return the tokens with the largest deviation of K at the chosen layer."""
    return _largest(among.deviation("keys"), count)


def values(among: Candidates, count: int) -> torch.Tensor:
    """Return the tokens with the largest deviation of V at the chosen layer."""
    return _largest(among.deviation("values"), count)


def question(among: Candidates, count: int) -> torch.Tensor:
    """Return the tokens with the most attention from the query, computed by a pass of the query."""
    return _largest(among.attention(), count)


SELECTIONS: dict[str, Select] = {
    "none": none,
    "all": every,
    "random": random,
    "first": first,
    "keys": keys,
    "values": values,
    "question": question,
}
"""Selections by name. Names joined by "+" share the count evenly, in order."""


def selection(named: str | Select | DeviationProfile) -> Select:
    """Return the selection of a name, for example "first+question", or of a measured profile.

    A function is returned unchanged.

    Raises:
        ConfigError: an unknown name, or a profile without rankings.
    """
    if isinstance(named, DeviationProfile):
        if not named.rankings:
            raise ConfigError("select is a deviation profile without rankings: give it as ratio")
        return lambda among, count: named.order(among.positions - among.first, 0)[:count]
    if callable(named):
        return named
    text("select", named)
    parts = named.split("+")
    if unknown := [part for part in parts if part not in SELECTIONS]:
        known = ", ".join(SELECTIONS)
        raise ConfigError(
            f"no selection is called {', '.join(unknown)}: {known}, several joined by +"
        )
    chosen = [SELECTIONS[part] for part in parts]
    if len(chosen) == 1:
        return chosen[0]

    def shared(among: Candidates, count: int) -> torch.Tensor:
        taken = among.positions.new_empty(0)
        for at, one in enumerate(chosen):
            share = -(-(count - len(taken)) // (len(chosen) - at))
            ranked = one(among, min(len(among), len(taken) + share))
            taken = torch.cat([taken, ranked[~torch.isin(ranked, taken)][:share]])
        return taken

    return shared


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest scores, equal scores in the order of positions."""
    return torch.argsort(scores, descending=True, stable=True)[:count]
