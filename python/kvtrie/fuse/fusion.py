"""Fusion: makes a single cache of chunks and a query, layer by layer.

A layer's reused K and V are copied to the chunks' offsets in a buffer, and keys are rotated to
their new positions. Recomputed tokens overwrite their rows and attend to the buffer with explicit
positions, while the next layer is loaded.
Invariant: all remaining tokens keep the stored bits (K rotated in fp32). The first chunk after the
prefix is exact and never computed. Cost: per layer a pass over the chosen tokens and the query, a
copy of the buffer's K and V, and over a lease a second copy to its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from kvtrie.fuse.log import FusionLog, Reused
from kvtrie.fuse.monitor import Quality
from kvtrie.fuse.rotation import Rotation
from kvtrie.fuse.select import Candidates
from kvtrie.kernels import Pages, Plane, recompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie.fuse.backing import Leased, Tensors
    from kvtrie.fuse.deviation import DeviationProfile
    from kvtrie.fuse.layers import DecoderLayers
    from kvtrie.fuse.log import Stopwatch
    from kvtrie.fuse.select import Select

__all__ = ["Deviation", "Fetched", "Fusion", "Piece", "Settings"]


class Piece(Protocol):
    """The prefix or a chunk of a fetch."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Its own tokens, int64 `(n,)`."""
        ...

    @property
    def at(self) -> int:
        """Position of the first token, to which its K is rotated."""
        ...

    @property
    def state(self) -> str:
        """State: "hit", "absent", "lost" or "given"."""
        ...


class Fetched(Protocol):
    """Source of the chunks' KV: `CacheStore.fetch_many`, or `InMemory`."""

    @property
    def parts(self) -> Sequence[Piece]:
        """The distinct chunks."""
        ...

    @property
    def order(self) -> Sequence[int]:
        """Index of the part of each chunk of the context."""
        ...

    @property
    def prefix(self) -> Piece | None:
        """The tokens before all chunks."""
        ...

    def wait(self, layer: int) -> Sequence[Piece]:
        """Wait for a layer and return the parts that failed to load."""
        ...

    def read(self, part: Any, layer: int, out: tuple[torch.Tensor, torch.Tensor]) -> object:  # noqa: ANN401 - its own
        """Copy K and V `(n, heads, dim)` of a layer of a part's own tokens to `out`."""
        ...


class Settings(NamedTuple):
    """How tokens are chosen; see `Fusor`."""

    select: Select
    ratios: Sequence[float]
    at: int
    rank_layers: Sequence[int]
    probe: int
    seed: int
    profile: DeviationProfile | None = None


class Deviation(NamedTuple):
    """Difference between recomputed and reused KV of one layer by token, largest first.

    Attributes:
        positions: int64 `(n,)`, of chunks' tokens.
        keys: fp32 `(n,)`, sum of squares over heads of fresh K minus reused K.
        values: fp32 `(n,)`, the same of V.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Fusion:
    """The run of one fusion.

    Args:
        decoder: the model.
        fetched: source of the chunks, with all absent parts computed.
        memory: memory of the fused cache.
        query: int64 `(m,)`.
        settings: settings of the selection.
        watch: measures time.
        compute_lost: computes the parts with failed loads.

    Attributes:
        ids: int64 `(T,)`, prefix, chunks and query.
        grid: bool `(layers, T - 1)`, the computed tokens of each layer.
        deviation: per layer, the computed tokens by their deviation.
        waited: layers loaded for the query's pass before the tokens were chosen.
        mass: share of the query's attention to candidates on the candidates left reused. None if
            attention was not computed.
        relative: per layer, deviation of V of the probed tokens relative to V. Empty without
            computed tokens.
    """

    def __init__(
        self,
        decoder: DecoderLayers,
        fetched: Fetched,
        memory: Leased | Tensors,
        query: NDArray[np.int64],
        *,
        settings: Settings,
        watch: Stopwatch,
        compute_lost: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._fetched = fetched
        self._memory = memory
        self._settings = settings
        self._compute_lost = compute_lost
        self._device = decoder.device
        self.watch = watch
        pieces, offset = list(_pieces(fetched)), 0
        self._layout: list[tuple[Piece, int]] = []
        for piece in pieces:
            self._layout.append((piece, offset))
            offset += len(piece.tokens)
        tokens = [piece.tokens for piece in pieces] + [query]
        self.ids = torch.as_tensor(np.concatenate(tokens), device=self._device)
        self.length = len(self.ids)
        self._reused = offset
        self._first = 0 if fetched.prefix is None else len(fetched.prefix.tokens)
        most = max([self.length, *(piece.at + len(piece.tokens) for piece, _ in self._layout)])
        # Kept here: a decoder replaces its tables when any thread asks for a different length.
        self._ropes = decoder.ropes(most)
        self._rotations = [self._rotation_of(piece, at) for piece, at in self._layout]
        self._laid = 0
        self._pages: tuple[object, Pages] | None = None
        self.grid = np.zeros((decoder.layers, self.length - 1), dtype=np.bool_)
        self.deviation: list[Deviation] = []
        self.relative: list[torch.Tensor] = []
        self.waited = 0
        self.mass: float | None = None
        self._cursor = 0
        self._hidden: torch.Tensor | None = None
        self._rows = self.ids.new_empty(0)
        self._mine = 0  # number of chunk tokens in `_rows`, before the query's tokens
        self._columns = np.empty(0, dtype=np.int64)
        self._attention: torch.Tensor | None = None
        self._candidates = self._among()

    def run(self) -> None:
        """Fuse all layers."""
        among, decoder = self._candidates, self._decoder
        ratios = self._settings.ratios
        with self.watch.part("select"):
            count = self._count(ratios[0])
            nothing = among.positions.new_empty(0)
            chosen = self._settings.select(among, count) if len(among) else nothing
            probed = self._probed(chosen)
            places = among.positions[torch.cat([chosen, probed])].sort().values
            if self._attention is not None:
                reused = torch.ones(len(among), dtype=torch.bool, device=self._device)
                reused[chosen] = False
                total = self._attention.sum()
                self.mass = float(self._attention[reused].sum() / total) if total > 0 else 0.0
        self._become(torch.cat([places, self._query(last=False)]))
        watched = among.positions[probed]
        for layer in range(self._cursor, decoder.layers):
            if len(ratios) > 1:
                self._narrow(layer, ratios[min(layer, len(ratios) - 1)])
            self._compute(layer, watched)
        self._cursor = decoder.layers

    def quality(self) -> Quality:
        """Estimate from the probed tokens the closeness of the result to a full prefill."""
        if not len(self._candidates):
            return Quality(1.0, "exact")
        if not self.relative:
            return Quality(None, "nothing")
        fresh = self.grid[:, self._candidates.positions.cpu().numpy()]
        share, how = float(1 - fresh.mean()), "count"
        if self.mass is not None:
            share, how = self.mass, "attention"
        off = float(torch.stack(self.relative).nanmean())
        return Quality(max(0.0, 1 - off * share), how)

    def finish(self, fates: Mapping[int, str]) -> FusionLog:
        """Return the log.

        Args:
            fates: by the identity of a piece, its state before it was computed.
        """
        spans, sizes = self._layout, self._decoder.widths
        bytes_per_token = sizes[0] * (sizes[1] + sizes[2]) * self._decoder.dtype.itemsize
        chunks: list[Reused] = []
        for piece, at in spans[self._fetched.prefix is not None :]:
            fresh = self.grid[:, at : at + len(piece.tokens)]
            chunks.append(
                Reused(
                    len(piece.tokens),
                    int((~fresh.any(axis=0)).sum()),
                    int((~fresh).sum()) * bytes_per_token,
                    fates.get(id(piece), piece.state),
                    self._exact(piece, at),
                )
            )
        return FusionLog(
            chunks,
            self.grid,
            (self._first, self._reused),
            self._settings.ratios[0],
            self.watch.read(),
            waits=self.waited,
        )

    def logits(self) -> torch.Tensor:
        """Return the logits after the last token, fp32 `(vocabulary,)`, over the fused cache.

        The last token's K and V are not kept: the caller's first pass computes them again.
        """
        last = torch.arange(self.length - 1, self.length, device=self._device)
        hidden = self._decoder.embed(self.ids[last])
        for layer in range(self._decoder.layers):
            past = self._memory.read(layer, self.length - 1)

            def append(
                keys: torch.Tensor,
                values: torch.Tensor,
                past: tuple[torch.Tensor, torch.Tensor] = past,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.cat([past[0], keys]), torch.cat([past[1], values])

            hidden = self._decoder.layer(layer, hidden, last, self.length, append)
        return self._decoder.head(hidden)[0].float()

    def _among(self) -> Candidates:
        positions: list[torch.Tensor] = []
        chunks: list[torch.Tensor] = []
        within: list[torch.Tensor] = []
        for index, (piece, at) in enumerate(self._layout[self._fetched.prefix is not None :]):
            if self._exact(piece, at):
                continue
            size = len(piece.tokens)
            positions.append(torch.arange(at, at + size))
            chunks.append(torch.full((size,), index))
            within.append(torch.arange(size))
        nothing = [torch.empty(0, dtype=torch.int64)]
        generator = torch.Generator().manual_seed(self._settings.seed)
        where, which, place = (
            torch.cat(each or nothing).to(self._device) for each in (positions, chunks, within)
        )
        return Candidates(where, which, place, self._deviate, self._attend, generator, self._first)

    def _exact(self, piece: Piece, at: int) -> bool:
        """Return whether a full prefill gives the same K and V: same prefix, same position.

        The prefix of KV given by the caller is unknown, so given KV is exact only at the start of
        the sequence.
        """
        first = at == self._first == piece.at
        return first and (piece.state != "given" or self._first == 0)

    def _rotation_of(self, piece: Piece, at: int) -> dict[int, Rotation]:
        """Return the rotations of a piece by `id` of the rope, empty for a piece left in place."""
        rotations: dict[int, Rotation] = {}
        if piece.at != at:
            old = torch.arange(len(piece.tokens), device=self._device) + piece.at
            for rope in self._ropes:
                if rope is not None and id(rope) not in rotations:
                    rotations[id(rope)] = Rotation.between(rope, old, old - piece.at + at)
        return rotations

    def _query(self, *, last: bool) -> torch.Tensor:
        return torch.arange(self._reused, self.length - (not last), device=self._device)

    def _lay_out(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffer of a layer, filled with reused KV or with the KV of an earlier pass."""
        if layer < self._laid:
            with self.watch.part("layout"):
                return self._memory.restore(layer, self.length)
        with self.watch.part("wait"):
            lost = self._fetched.wait(layer)
        if lost:
            with self.watch.part("absent"):
                self._compute_lost()
        with self.watch.part("layout"):
            keys, values = self._memory.buffer(layer, self.length)
            rope = self._ropes[layer]
            for (piece, at), rotations in zip(self._layout, self._rotations, strict=True):
                columns = slice(at, at + len(piece.tokens))
                self._fetched.read(piece, layer, (keys[columns], values[columns]))
                if (rotation := rotations.get(id(rope))) is not None:
                    rotation.into(keys[columns], keys[columns])
        self._laid = layer + 1
        return keys, values

    def _attend(self) -> torch.Tensor:
        """Return the query's attention to each candidate over the reused cache."""
        if self._attention is not None:
            return self._attention
        decoder = self._decoder
        places = self._query(last=True)
        found = torch.zeros(self.length, device=self._device)
        with self.watch.part("recompute"):
            hidden = decoder.embed(self.ids[places])
            for layer in range(max(self._settings.rank_layers) + 1):
                laid_out = layer < self._laid
                keys, values = self._lay_out(layer)
                into = _Into(keys, values, places, self.watch, compare=False)
                weights = found if layer in self._settings.rank_layers else None
                hidden = decoder.layer(
                    layer, hidden, places, self.length, into.merge, weights=weights
                )
                if not laid_out:
                    with self.watch.part("layout"):
                        self._memory.keep(layer)
        self._attention = found[self._candidates.positions]
        self.waited = max(self._settings.rank_layers) + 1
        return self._attention

    def _deviate(self, kind: str) -> torch.Tensor:
        """Return the deviation of K or V at the chosen layer, with all lower layers computed."""
        layer, decoder = self._settings.at, self._decoder
        places = self._candidates.positions
        if self._cursor < layer or self._hidden is None:
            self._become(torch.cat([places, self._query(last=False)]))
            for below in range(self._cursor, layer):
                self._compute(below, places)
        assert self._hidden is not None  # noqa: S101 - set by `_become`
        laid_out = layer < self._laid
        keys, values = self._lay_out(layer)
        with self.watch.part("recompute"):
            if kind == "values":
                fresh, reused = decoder.values(layer, self._hidden), values
            else:
                fresh = decoder.project(layer, self._hidden, self._rows, self.length - 1)[0]
                reused = keys
        if not laid_out:
            with self.watch.part("layout"):
                self._memory.keep(layer)
        fresh = fresh[: len(places)].float()
        return (fresh - reused[places].float()).square_().sum(dim=(1, 2))

    def _probed(self, chosen: torch.Tensor) -> torch.Tensor:
        """Draw candidates to compute only for estimating the error of the remaining candidates."""
        left = torch.ones(len(self._candidates), dtype=torch.bool, device=self._device)
        left[chosen] = False
        rest = left.nonzero().flatten()
        drawn = torch.randperm(len(rest), generator=self._candidates.generator)
        return rest[drawn[: self._settings.probe].to(rest.device)]

    def _become(self, rows: torch.Tensor) -> None:
        """Continue with the given tokens, from layer 0 or from the present hidden states."""
        with self.watch.part("recompute"):
            if self._hidden is None:
                self._hidden = self._decoder.embed(self.ids[rows]) if len(rows) else None
            else:
                self._hidden = self._hidden[torch.searchsorted(self._rows, rows)]
        self._rows = rows
        self._mine = int((rows < self._reused).sum())
        self._columns = rows.cpu().numpy()

    def _count(self, ratio: float) -> int:
        """Return the number of candidates for a share of all chunk tokens."""
        return min(len(self._candidates), round(ratio * (self._reused - self._first)))

    def _narrow(self, layer: int, ratio: float) -> None:
        """Keep the candidates with the largest deviation, by profile or at the previous layer."""
        count, profile = self._count(ratio), self._settings.profile
        if count >= self._mine or not (self.deviation or profile):
            return
        if profile is not None:
            mine = self._rows[: self._mine]
            worst = mine[profile.order(mine - self._first, layer)]
        else:
            worst = self.deviation[-1].positions
        worst = worst[:count].sort().values
        self._become(torch.cat([worst, self._query(last=False)]))

    def _compute(self, layer: int, watched: torch.Tensor) -> None:
        """Compute a layer for the current tokens."""
        laid_out = layer < self._laid
        keys, values = self._lay_out(layer)
        keys, values = keys[: self.length - 1], values[: self.length - 1]
        rows = self._rows
        if len(rows):
            assert self._hidden is not None  # noqa: S101 - set with the rows
            into = _Into(keys, values, rows, self.watch)
            with self.watch.part("recompute"):
                self._hidden = self._decoder.layer(
                    layer, self._hidden, rows, self.length - 1, into.merge
                )
            with self.watch.part("select"):
                self._note(layer, into.deviation, values, watched)
        with self.watch.part("layout"):
            self._memory.keep(layer, rows if laid_out else None)
        self._cursor = layer + 1

    def _note(
        self, layer: int, deviation: torch.Tensor, values: torch.Tensor, watched: torch.Tensor
    ) -> None:
        """Record the computed tokens and deviations of a layer, without synchronizing a GPU."""
        self.grid[layer, self._columns] = True
        mine, (keys, their_values) = self._rows[: self._mine], deviation[:, : self._mine]
        order = torch.argsort(keys + their_values, descending=True, stable=True)
        self.deviation.append(Deviation(mine[order], keys[order], their_values[order]))
        if self._mine:
            seen = torch.isin(mine, watched if len(watched) else mine)
            square = values[mine].float().square().sum(dim=(1, 2)) * seen
            self.relative.append(((their_values * seen).sum() / square.sum()).sqrt())


class _Into:
    """Writes fresh K and V into a layer's buffer and measures the deviation of reused KV."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        places: torch.Tensor,
        watch: Stopwatch,
        *,
        compare: bool = True,
    ) -> None:
        self._watch = watch
        self._keys = keys
        self._values = values
        self._places = places
        self._compare = compare
        self.deviation = torch.empty((2, 0))

    def merge(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter K and V into the buffer and return the whole buffer."""
        with self._watch.part("scatter"):
            pages = Pages((Plane(self._keys[None]), Plane(self._values[None])))
            fresh = keys.contiguous(), values.contiguous()
            found = recompute(pages, self._places, *fresh, deviation=self._compare).deviation
        if found is not None:
            self.deviation = found
        return self._keys, self._values


def _pieces(fetched: Fetched) -> Iterator[Piece]:
    if fetched.prefix is not None:
        yield fetched.prefix
    for index in fetched.order:
        yield fetched.parts[index]
