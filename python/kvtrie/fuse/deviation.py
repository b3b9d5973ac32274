"""DeviationProfile: measured deviation of reused KV, layer by layer.

A fusion of all tokens measures the profile. Later fusions choose tokens by its rankings and ratios
by its shares, without comparing KV to choose.
Invariant: a ranking names a token once. Shares never rise from a layer to the next. Cost: a number
per token and ranked layer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.input import json_of, read_text
from kvtrie.settings.argument import few, instance, put, real, whole

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["DeviationProfile"]

_MOST = 2**32 - 1
_COVER = 0.5
"""Default share of a layer's deviation covered by the tokens to recompute."""


class _Layer(Protocol):
    """Tokens of a layer by their deviation, largest first: `kvtrie.fuse.fusion.Deviation`."""

    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def keys(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...


class _Log(Protocol):
    """The columns of a `FusionLog`."""

    @property
    def grid(self) -> NDArray[np.bool_]: ...
    @property
    def span(self) -> tuple[int, int]: ...


class _Measured(Protocol):
    """The measured part of a `Fused`."""

    @property
    def log(self) -> _Log: ...
    @property
    def deviation(self) -> Sequence[_Layer]: ...


@dataclass(frozen=True, slots=True)
class DeviationProfile:
    """A measured profile, as input to `Fusor` and `Controller`.

    Attributes:
        rankings: by layer, tokens of a context's chunks, by descending deviation. Tokens count
            from 0 over all chunks in order, so a ranking belongs to a single context. Unranked
            tokens come last.
        shares: per layer from layer 0 on, the share of chunk tokens to recompute. Shares never
            rise, and the last share is for all further layers.

    Raises:
        ConfigError: a layer, token or share out of range, shares that rise, or a profile without
            rankings and shares.
    """

    rankings: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    shares: Sequence[float] = ()

    def __post_init__(self) -> None:
        rankings: dict[int, tuple[int, ...]] = {}
        for layer, given in sorted(instance("rankings", self.rankings, Mapping).items()):
            name = f"rankings[{layer!r}]"
            tokens = tuple(whole(name, each, 0, _MOST) for each in few(name, given, _MOST))
            if len(set(tokens)) < len(tokens):
                raise ConfigError(f"{name} names {len(tokens) - len(set(tokens))} tokens twice")
            at = whole("a layer of rankings", layer, 0, _MOST)
            if tokens:
                rankings[at] = tokens
        shares = tuple(
            real(f"shares[{at}]", each, 0, 1)
            for at, each in enumerate(few("shares", self.shares, _MOST))
        )
        if any(one < other for one, other in pairwise(shares)):
            raise ConfigError(f"shares are {shares}, none larger than the previous one wanted")
        if not shares and not rankings:
            raise ConfigError("a deviation profile has rankings or shares, or both")
        put(self, rankings=rankings, shares=shares)

    @classmethod
    def measured(cls, fused: _Measured, *, cover: float = _COVER) -> Self:
        """Return the profile of a fusion, preferably with `ratio=1.0`.

        Args:
            fused: the fusion. Its computed tokens are ranked at each layer.
            cover: part of a layer's measured deviation to cover. The share of a layer is the
                smallest share of tokens with this part, or the larger share of a later layer.

        Raises:
            ConfigError: the fusion computed no chunk token.
        """
        cover = real("cover", cover, 0, 1)
        first, stop = fused.log.span
        layers = [at for at, row in enumerate(fused.log.grid) if row.any()]
        rankings: dict[int, Sequence[int]] = {}
        needed: dict[int, float] = {}
        for layer, found in zip(layers, fused.deviation, strict=True):
            if len(found.positions):
                rankings[layer] = (found.positions - first).tolist()
                sums = (found.keys + found.values).double().cumsum(dim=0).cpu().numpy()
                count = int(np.searchsorted(sums, cover * sums[-1])) + 1 if sums[-1] > 0 else 0
                needed[layer] = count / (stop - first)
        if not rankings:
            raise ConfigError("a fusion that computed no token of its chunks measures no deviation")
        each = [needed.get(layer, 0.0) for layer in range(len(fused.log.grid))]
        return cls(rankings, tuple(accumulate(reversed(each), max))[::-1])

    def share(self, layers: int) -> float:
        """Return the mean of the shares over a number of layers."""
        return sum(self._each(layers)) / layers

    def scaled(self, ratio: float, layers: int, most: float = 1.0) -> tuple[float, ...]:
        """Return the shares scaled to a mean of `ratio`, each at most `most`."""
        mean = self.share(layers)
        return tuple(min(most, each * ratio / mean if mean else 0) for each in self._each(layers))

    def _each(self, layers: int) -> tuple[float, ...]:
        return (*self.shares, *[self.shares[-1]] * (layers - len(self.shares)))[:layers]

    def ranking(self, layer: int) -> Sequence[int]:
        """Return the ranking of the layer, else of the next ranked layer, else of the last."""
        later = [at for at in self.rankings if at >= layer]
        return self.rankings[later[0] if later else max(self.rankings)]

    def order(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Return indices into `tokens`, int64 `(n,)`, by descending deviation at a layer.

        Args:
            tokens: chunk tokens of a context, int64 `(n,)`, counted over all chunks.
            layer: layer of the ranking, see `ranking`.
        """
        ranked = torch.as_tensor(self.ranking(layer), dtype=torch.int64)
        size = 1 + max(int(ranked.max()), int(tokens.max()) if len(tokens) else 0)
        places = torch.full((size,), len(ranked))
        places[ranked] = torch.arange(len(ranked))
        return torch.argsort(places.to(tokens.device)[tokens], stable=True)

    def check(self, tokens: int, layers: int) -> None:
        """Refuse a profile of another context or model.

        Raises:
            ConfigError: it ranks a missing token or layer.
        """
        most = max((max(each, default=-1) for each in self.rankings.values()), default=-1)
        if most >= tokens:
            raise ConfigError(
                f"the deviation profile ranks token {most}, the context's chunks have {tokens}: "
                "a ranking belongs to the context that it was measured on"
            )
        named = max(max(self.rankings, default=-1) + 1, len(self.shares))
        if named > layers:
            raise ConfigError(f"the deviation profile has {named} layers, the model {layers}")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the profile of a file written by `write`.

        Raises:
            ConfigError: the file cannot be read or is no deviation profile.
        """
        what = f"{path} is no deviation profile"
        given = json_of(read_text(path, "the deviation profile"), what)
        try:
            rankings = {int(layer): tokens for layer, tokens in given["rankings"].items()}
            shares = given["shares"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{what}: {error!r}") from error
        return cls(rankings, shares)

    def write(self, path: Path) -> None:
        """Write the profile to a file, as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        document = {"rankings": dict(self.rankings), "shares": list(self.shares)}
        try:
            path.write_text(json.dumps(document) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            raise ConfigError(f"cannot write the deviation profile {path}: {error}") from error
