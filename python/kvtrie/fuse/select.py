"""Selection: which of the reused tokens are computed again, one function per way.

A way ranks the candidates, tokens whose KV depends on the context, by the error that recomputing
them should remove, and takes the first `count`. Deviations are ranked, never compared with a
threshold: of a trained model's V they are a few thousandths of its squares at the first layers and
a fifth of them at the middle ones.
Invariant: what is taken is distinct, and at most `count`. Cost: `first`, `random`, `all`, `none`
nothing; `keys`, `values` all layers below theirs in full; `question` a pass of the query's tokens.
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

__all__ = ["WAYS", "Candidates", "Select", "way"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Input of a selection.

    Attributes:
        positions: int64 `(m,)`, ascending: the candidates' positions in the sequence.
        chunks: int64 `(m,)`: which of the context's chunks each is in.
        within: int64 `(m,)`: its place in the chunk.
        deviation: gives, for "keys" or "values", fp32 `(m,)`: per candidate the sum of squares by
            which K or V at the chosen layer differs from what is reused, all layers below it
            computed in full (CacheBlend, section 4.3).
        attention: gives fp32 `(m,)`: the query's attention to each candidate over the reused
            cache, summed over the chosen layers, query heads and the query's tokens.
        generator: draws whatever is drawn.
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
"""Given candidates and how many may be taken: int64, indices into the candidates, best first."""


def none(among: Candidates, count: int) -> torch.Tensor:  # noqa: ARG001 - as all ways
    """Nothing: plain reuse."""
    return among.positions.new_empty(0)


def every(among: Candidates, count: int) -> torch.Tensor:  # noqa: ARG001 - as all ways
    """Return all tokens, at any ratio: a full prefill of all but the exact chunks."""
    return torch.arange(len(among), device=among.positions.device)


def random(among: Candidates, count: int) -> torch.Tensor:
    """Drawn evenly."""
    drawn = torch.randperm(len(among), generator=among.generator)
    return drawn[:count].to(among.positions.device)


def first(among: Candidates, count: int) -> torch.Tensor:
    """Return the first tokens of each chunk, equally many of each as far as it has them."""
    return torch.argsort(among.within, stable=True)[:count]


def keys(among: Candidates, count: int) -> torch.Tensor:
    """Those whose K deviates most at the chosen layer."""
    return _largest(among.deviation("keys"), count)


def values(among: Candidates, count: int) -> torch.Tensor:
    """Those whose V deviates most at the chosen layer."""
    return _largest(among.deviation("values"), count)


def question(among: Candidates, count: int) -> torch.Tensor:
    """Those that the query attends to most: serves this query, and needs its pass first."""
    return _largest(among.attention(), count)


WAYS: dict[str, Select] = {
    "none": none,
    "all": every,
    "random": random,
    "first": first,
    "keys": keys,
    "values": values,
    "question": question,
}
"""Ways by name; names joined by "+" share the count evenly, in that order."""


def way(named: str | Select | DeviationProfile) -> Select:
    """Return the selection of a name such as "first+question", or of a measured profile.

    A function is returned as it is.

    Raises:
        ConfigError: a name that is not known, or a profile without rankings.
    """
    if isinstance(named, DeviationProfile):
        if not named.rankings:
            raise ConfigError("select is a deviation profile without rankings: give it as ratio")
        return lambda among, count: named.order(among.positions - among.first, 0)[:count]
    if callable(named):
        return named
    text("select", named)
    parts = named.split("+")
    if unknown := [part for part in parts if part not in WAYS]:
        raise ConfigError(
            f"no selection is called {', '.join(unknown)}: {', '.join(WAYS)}, several joined by +"
        )
    chosen = [WAYS[part] for part in parts]
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
    """The largest first; equal ones in the order of positions."""
    return torch.argsort(scores, descending=True, stable=True)[:count]
