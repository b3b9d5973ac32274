"""CellCache: a layer's rows during the forward and backward pass of a row of cells.

The cache replays the decisions of a log. The operator of a step overwrites rows and attends. Its
backward pass differentiates attention, returns the gradients of the written rows, and restores the
old rows.
Invariant: after the backward pass of a cell, the rows and the two gradient buffers are in the state
of its start. Except for the prefill's attention, the graph holds no tensor with all rows of the
cache. Cost: a step's queries and its overwritten rows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import attend, attend_backward, attend_masked
from kvtrie.selective import KVCache, KVCacheWithBuffers
from kvtrie.selective.buffers import put_rows, take_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.selective import AttnWeightsReplayLog

__all__ = ["CellCache", "RowsAreIn", "Start"]


class RowsAreIn(Exception):  # noqa: N818 - a signal, not an error
    """Ends a pass early: the layer's rows are written and its output is not needed."""


class Start(NamedTuple):
    """State at the start of a cell.

    Attributes:
        keys: `(batch, kv_heads, n, dim)` of the n filled rows.
        values: like `keys`.
        token_pos: int32 `(batch, kv_heads, n)`.
        step: index of the next step.
        input_pos: the next token's position.
        ring: next position in the grace ring.
    """

    keys: torch.Tensor
    values: torch.Tensor
    token_pos: torch.Tensor
    step: int
    input_pos: int
    ring: int


class CellCache(KVCache):
    """The rows of a layer with gradients, replayed from a log.

    Args:
        model: the logged cache, with sizes, format and policy.
        log: its decisions.
        forward_gb: bound of attention's temporary arrays, in 10^9 bytes.
        backward_gb: the same for the backward pass.
    """

    def __init__(
        self,
        model: KVCacheWithBuffers,
        log: AttnWeightsReplayLog,
        *,
        forward_gb: float = 3.0,
        backward_gb: float = 3.0,
    ) -> None:
        self.place = model.place
        self.replay_log = log
        self.scale = None
        self.first = model.first
        self.grace = model.arguments.grace_period
        self.only_rows = False
        self._weighted = model.update_requires_attn_weights
        self._rounded: Callable[[torch.Tensor], torch.Tensor] | None = (
            None if model.buffers.exact else model.buffers.rounded
        )
        self._forward_gb, self._backward_gb = forward_gb, backward_gb
        self._keys, self._values = self.place.empty(), self.place.empty()
        self._token_pos = torch.zeros(
            self.place.shape[:3], dtype=torch.int32, device=self.place.device
        )
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chain = torch.zeros(())
        self.reset()

    # ------------------------------------------------------------------------------ the step

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Run the log's next step, see `KVCache.forward`.

        Raises:
            RowsAreIn: `only_rows` is set and the rows are written.
        """
        if self.only_rows:
            self.advance(key, value)
            self.end_step(key, value)
            raise RowsAreIn
        out: torch.Tensor
        apply: Any
        if self.input_pos == 0:
            apply = _Prefill.apply
            self.chain = apply(key, value, self.chain, self)
            return self.attended_first(query, key, value, self._forward_gb)
        apply = _Step.apply
        sinks = None if self.terms is None else self.terms.sinks
        out, self.chain = apply(query, key, value, sinks, self.chain, self)
        return out

    def ends(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a root and gradient for the backward pass, so every step's operator runs."""
        return [(self.chain, torch.zeros_like(self.chain))]

    def advance(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write the next step's tokens and return the data for `undo_step` to undo it."""
        new = key.shape[2]
        rows = self._chosen(new)
        undo: tuple[torch.Tensor, ...] = ()
        turning, ring = self._ring_rows(new)
        if self._log.rows[self.step] is not None:
            undo = tuple(take_rows(plane, rows) for plane in self._planes)
            if turning:
                for plane in self._planes:
                    put_rows(plane, rows[:, :, :turning], take_rows(plane, ring))
                rows = torch.cat((rows[:, :, turning:], ring), dim=2)
            if turning == new:
                self._ring = (self._ring + new) % max(1, self.grace)
        else:
            self.filled += new
        positions = torch.arange(
            self.input_pos, self.input_pos + new, dtype=torch.int32, device=rows.device
        )
        for plane, given in zip(self._planes, (key, value, positions.expand_as(rows)), strict=True):
            put_rows(plane, rows, given)
        self.step += 1
        self.input_pos += new
        return undo

    def end_step(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """End a step: replace its rows by their numbers after a write to the buffers."""
        if self._rounded is None:
            return
        rows = self._written(key.shape[2])
        put_rows(self._keys, rows, self._rounded(key))
        put_rows(self._values, rows, self._rounded(value))

    def undo_step(
        self, new: int, undo: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Undo the last step, and return the gradients of its K and V.

        Args:
            new: number of its tokens.
            undo: result of `advance`.
        """
        written = self._written(new)
        self.step -= 1
        self.input_pos -= new
        grads = self.grads
        found = take_rows(grads[0], written), take_rows(grads[1], written)
        rows = self._chosen(new, filled=self.filled - new)
        if not undo:  # the rows were empty before
            for plane in grads:
                put_rows(plane, rows, torch.zeros_like(found[0]))
            self.filled -= new
            return found
        turning, ring = self._ring_rows(new)
        if turning == new:
            self._ring = (self._ring - new) % max(1, self.grace)
            turning, ring = self._ring_rows(new)
        # The first rows hold the tokens moved out of the ring: return their content and gradients.
        for plane in (*self._planes, *grads):
            if turning:
                put_rows(plane, ring, take_rows(plane, rows[:, :, :turning]))
        for plane, old in zip(self._planes, undo, strict=True):
            put_rows(plane, rows, old)
        for plane in grads:  # no later query sees the overwritten rows
            put_rows(plane, rows, torch.zeros_like(found[0]))
        return found

    def attended(self, query: torch.Tensor) -> torch.Tensor:
        """Return the output of the last written step, by the kernel of the forward phase."""
        given: dict[str, Any] = {
            "token_pos": self.token_pos,
            "input_pos": self.input_pos - query.shape[2],
            "first": self.first,
            "scale": self.scale,
        }
        keys, values = self.keys_values()
        given["tmp_array_limit_gb"] = self._forward_gb
        if self._weighted or self.terms is not None:
            return attend(query, keys, values, terms=self.terms, **given)[0]
        return attend_masked(query, keys, values, **given)

    def attended_back(
        self, grad: torch.Tensor, query: torch.Tensor, sink_grads: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the queries' gradient and add the rows' gradients to the gradient buffers."""
        keys, values = self.keys_values()
        key_grads, value_grads = self.grads
        return attend_backward(
            grad,
            query,
            keys,
            values,
            key_grads[:, :, : self.filled],
            value_grads[:, :, : self.filled],
            token_pos=self.token_pos,
            input_pos=self.input_pos - query.shape[2],
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            sink_grads=sink_grads,
            tmp_array_limit_gb=self._backward_gb,
        )

    def rewrite(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Restore a step's exact numbers in its rows, as used by its attention."""
        if self._rounded is not None:
            rows = self._written(key.shape[2])
            put_rows(self._keys, rows, key)
            put_rows(self._values, rows, value)

    @property
    def rounds(self) -> bool:
        """Whether rows become less exact after their step."""
        return self._rounded is not None

    def _chosen(self, new: int, filled: int | None = None, step: int | None = None) -> torch.Tensor:
        """Return the rows of a step, by default the next, int64 `(batch, kv_heads, new)`."""
        rows = self._log.rows[self.step if step is None else step]
        if rows is not None:
            return rows.to(self.place.device, torch.int64)
        start = self.filled if filled is None else filled
        places = torch.arange(start, start + new, device=self.place.device)
        return places.expand(*self.place.shape[:2], new)

    def _ring_rows(self, new: int, start: int | None = None) -> tuple[int, torch.Tensor]:
        """Return the number of ring rows used by a step, and the rows from `start` on."""
        turning = min(new, self.grace)
        first = self._ring if start is None else start
        places = torch.arange(turning, device=self.place.device) + first
        ring = places % max(1, self.grace) + self.place.shape[2] - self.grace
        return turning, ring.expand(*self.place.shape[:2], turning)

    def _written(self, new: int) -> torch.Tensor:
        """Return the rows of the last step's tokens, in order."""
        step = self.step - 1
        rows = self._chosen(new, filled=self.filled - new, step=step)
        if self._log.rows[step] is None:
            return rows
        turning, ring = min(new, self.grace), self._ring
        if turning == new and self.grace:
            ring = (ring - new) % self.grace
        return torch.cat((rows[:, :, turning:], self._ring_rows(new, ring)[1]), dim=2)

    # ------------------------------------------------------------------------------ position

    def start(self) -> Start:
        """Return a copy of the state, the start of the next cell."""
        keys, values = self.keys_values()
        return Start(
            keys.clone(),
            values.clone(),
            self.token_pos.clone(),
            self.step,
            self.input_pos,
            self._ring,
        )

    def begin(self, start: Start | None) -> None:
        """Set the state to the start of a cell, None for the first cell."""
        self.reset()
        if start is None:
            return
        self.filled = start.keys.shape[2]
        for plane, rows in zip(self._planes, start[:3], strict=True):
            plane[:, :, : self.filled] = rows
        self.step, self.input_pos, self._ring = start.step, start.input_pos, start.ring

    def differentiate(self) -> None:
        """Start a chain of operators for the next cell."""
        self.chain = torch.zeros((), device=self.place.device, requires_grad=True)
        if self._grads is None:
            shape, device = self.place.shape, self.place.device
            self._grads = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of K and V in the rows, fp32 `(batch, kv_heads, rows, dim)` each."""
        if self._grads is None:
            raise ConfigError("this cell has no gradients yet: differentiate() comes first")
        return self._grads

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self.step = self.filled = self.input_pos = self._ring = 0

    @property
    def _log(self) -> AttnWeightsReplayLog:
        assert self.replay_log is not None  # noqa: S101 - set on creation
        return self.replay_log

    @property
    def _planes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._keys, self._values, self._token_pos

    @property
    def token_pos(self) -> torch.Tensor:
        """Positions of the tokens in the filled rows, int32."""
        return self._token_pos[:, :, : self.filled]

    @property
    def scores(self) -> torch.Tensor:
        """Zeros: a replay needs no scores."""
        return torch.zeros_like(self.token_pos, dtype=torch.float32)

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the filled rows."""
        return self._keys[:, :, : self.filled], self._values[:, :, : self.filled]

    @property
    def largest_step(self) -> int:
        """Number of tokens of the log's next step, 0 after its end."""
        steps = self._log.steps
        return steps[self.step] if self.step < len(steps) else 0


# pyright: reportIncompatibleMethodOverride=false
# (torch's Function takes any arguments)


class _Step(torch.autograd.Function):
    """A step after the prefill: overwrites rows, then attends to all rows."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,  # noqa: ANN401 - torch's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        chain: torch.Tensor,
        cell: CellCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        undo = cell.advance(key, value)
        out = cell.attended(query)
        cell.end_step(key, value)
        ctx.set_materialize_grads(value=False)
        exact = (key, value) if cell.rounds else ()
        ctx.save_for_backward(query, *exact, *undo)
        ctx.cell, ctx.exact = cell, len(exact)
        ctx.sinks = None if sinks is None else sinks.dtype
        return out, chain.clone()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's context
        grad: torch.Tensor | None,
        chain: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        query, *saved = ctx.saved_tensors
        cell: CellCache = ctx.cell
        exact, undo = saved[: ctx.exact], tuple(saved[ctx.exact :])
        queries = sinks = None
        if grad is not None:
            if exact:
                cell.rewrite(*exact)
            if ctx.needs_input_grad[3]:
                sinks = torch.zeros(query.shape[1], device=query.device)
            queries = cell.attended_back(grad, query, sinks)
            sinks = None if sinks is None else sinks.to(ctx.sinks)
        keys, values = (each.to(query.dtype) for each in cell.undo_step(query.shape[2], undo))
        return queries, keys, values, sinks, chain, None


class _Prefill(torch.autograd.Function):
    """The first step: fills rows. torch differentiates its attention to its own tokens."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        key: torch.Tensor,
        value: torch.Tensor,
        chain: torch.Tensor,
        cell: CellCache,
    ) -> torch.Tensor:
        cell.advance(key, value)
        cell.end_step(key, value)
        ctx.cell, ctx.new, ctx.dtype = cell, key.shape[2], key.dtype
        return chain.clone()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's context
        chain: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        keys, values = (each.to(ctx.dtype) for each in ctx.cell.undo_step(ctx.new, ()))
        return keys, values, chain, None
