"""LongContextGradients: the gradients of a loss over long sequences, with a cache's policy.

The forward phase is inference by steps. It logs the decisions and keeps the inputs of each row of
cells. The backward phase runs the rows of cells from the top. For each row it first computes K and
V at the starts of cells again, then runs the cells from right to left, each forwards and backwards
with autograd.
Invariant: gradients equal plain autograd with the same decisions.
Cost: three passes over the sequence, and the memory of a cell in addition to the checkpoints.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective import AttnWeightsReplayLog, CacheSettings, SelectiveCache
from kvtrie.selective.attention import Passing
from kvtrie.train.cell import CellCache, RowsAreIn, Start
from kvtrie.train.cells import columns, rows
from kvtrie.train.checkpoint import Checkpoint, block_of, coded_bytes
from kvtrie.train.decoder import Decoder
from kvtrie.train.host_pool import HostPool
from kvtrie.train.residence import Residence
from kvtrie.train.settings import GradientSettings
from kvtrie.train.spill import Spill
from kvtrie.train.window_cell import WindowCell

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from transformers import PreTrainedModel

    from kvtrie.train.decoder import Rotation
    from kvtrie.train.head import HeadModel

__all__ = ["LongContextGradients"]


class LongContextGradients:
    """Computes gradients of long sequences by cells.

    Args:
        model: a causal language model supported by `SelectiveCache`, with or without peft adapters.
        head: computes the loss from the outputs.
        settings: settings of the cache, the same as for later inference.
        grad: cells and checkpoints.
        yarn_rope: see `SelectiveCache`.
        attention_forward_temp_size_gb: bound of attention's temporary arrays, in 10^9 bytes.
        attention_backward_temp_size_gb: the same in the backward pass.
        residence: place of the weights during a batch. None leaves them in place.
        watch: called with "forward" and None at the start of a batch, with "row" and the first
            layer at the start of a row of cells, and with "end" and None at the end.

    Attributes:
        logs: replay log of each layer for the last sequences.
        right: number of correctly predicted targets of the last sequences, int64 `(batch,)`, None
            if undefined for the head.
        checkpoint_bytes: peak bytes of checkpoints in host memory for the last sequences.

    Raises:
        ConfigError: an unsupported model.
    """

    def __init__(
        self,
        model: PreTrainedModel | Any,  # noqa: ANN401 - a PeftModel
        head: HeadModel,
        settings: CacheSettings,
        grad: GradientSettings | None = None,
        *,
        yarn_rope: bool = True,
        attention_forward_temp_size_gb: float = 3.0,
        attention_backward_temp_size_gb: float = 3.0,
        residence: Residence | None = None,
        watch: Callable[[str, int | None], None] | None = None,
    ) -> None:
        self.decoder = Decoder(model)
        self.residence = Residence() if residence is None else residence
        self.watch = watch
        self.right: torch.Tensor | None = None
        self.head = head
        self.settings = settings
        self.grad = GradientSettings() if grad is None else grad
        self.logs: list[AttnWeightsReplayLog] = []
        self.checkpoint_bytes = 0
        self._pool: HostPool | None = None
        self._yarn_rope = yarn_rope
        self._forward_gb = attention_forward_temp_size_gb
        self._backward_gb = attention_backward_temp_size_gb

    @torch.no_grad()
    def loss(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return only the loss, by inference, see `gradients`."""
        batch = _Batch(self, input_ids, targets, attention_mask, scale=None)
        with self.residence.forward():
            batch.read()
        return batch.loss

    def gradients(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        scale: float = 1.0,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add gradients to every parameter of model and head with `requires_grad`.

        Args:
            input_ids: int64 `(batch, tokens)`.
            targets: int64 `(batch, up to tokens)`, targets of the last outputs for the head,
                `IGNORED` for no target.
            scale: factor of the gradients, not of the loss.
            attention_mask: `(batch, tokens)`, 0 before each row's first token, with padding on the
                left.

        Returns:
            The loss, fp32: each row's sum over its targets divided by `num_target_entries`, mean
            over the batch.

        Raises:
            ConfigError: shapes or settings do not match. No gradient was added then.
        """
        batch = _Batch(self, input_ids, targets, attention_mask, scale=scale)
        try:
            self._say("forward")
            with self.residence.forward():
                batch.read()
            every = rows(len(self.decoder.layers), self.grad)
            for at, layers in reversed(list(enumerate(every))):
                self._say("row", layers.start)
                with self.residence.row(layers, every[at - 1] if at else None):
                    batch.run_row(layers)
            self._say("end")
        finally:
            batch.close()
        return batch.loss

    def pool(self, device: torch.device) -> HostPool:
        """Return the host memory for checkpoints of batches on a device."""
        if self._pool is None or self._pool.device != device:
            self._pool = HostPool(device)
        return self._pool

    def _say(self, what: str, layer: int | None = None) -> None:
        if self.watch is not None:
            self.watch(what, layer)

    @property
    def forward_gb(self) -> float:
        """Bound of attention's temporary arrays."""
        return self._forward_gb

    @property
    def backward_gb(self) -> float:
        """Bound of attention's temporary arrays in the backward pass."""
        return self._backward_gb

    @property
    def yarn_rope(self) -> bool:
        """Whether RoPE is scaled for sequences beyond the trained length."""
        return self._yarn_rope


class _Row:
    """Caches for attention during a row of cells, by layer."""

    def __init__(self, layers: range, cells: Sequence[CellCache | WindowCell]) -> None:
        self._caches = dict(zip(layers, cells, strict=True))

    @property
    def caches(self) -> Any:  # noqa: ANN401 - read by number
        """The caches, by layer."""
        return self._caches


class _Batch:
    """State of the computation of a batch's gradients."""

    def __init__(
        self,
        owner: LongContextGradients,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scale: float | None,
    ) -> None:
        _check(input_ids, targets, attention_mask)
        self._owner, self._decoder, self._head = owner, owner.decoder, owner.head
        self._settings, self._grad = owner.settings, owner.grad
        place = owner.residence.place
        self._ids, self._targets, self._scale = place(input_ids), place(targets), scale
        attention_mask = self._mask = None if attention_mask is None else place(attention_mask)
        self._columns = None
        if attention_mask is not None:
            self._columns = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        self._passing = Passing(self._decoder.config)
        self._steps: list[range] = []
        self._cells: list[range] = []
        self._inputs: dict[int, list[Checkpoint | None]] = {}
        self._seeds: list[Checkpoint | None] = []
        self._spill: Spill | None = None
        self._pool = owner.pool(self._ids.device)
        self._models: Sequence[Any] = ()
        self._entries = owner.head.num_target_entries(self._targets).clamp(min=1)
        self.loss = torch.zeros((), device=self._ids.device)

    # --------------------------------------------------------------------------- forward phase

    def read(self) -> None:
        """Read the sequences by steps, for loss, head gradients, logs and inputs of rows."""
        decoder, (size, total) = self._decoder, self._ids.shape
        decoder.begin(total, yarn_rope=self._owner.yarn_rope)
        cache = SelectiveCache(
            decoder.model,
            self._settings,
            size,
            yarn_rope=self._owner.yarn_rope,
            attention_forward_temp_size_gb=self._owner.forward_gb,
        )
        with cache:
            lengths = cache.steps(total)
            ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
            self._steps = [range(hi - n, hi) for hi, n in zip(ends, lengths, strict=True)]
            chosen = [each.cache_length for each in cache.caches if each.span is None]
            fewest = min(chosen or [each.cache_length for each in cache.caches])
            self._cells = columns(lengths, fewest, self._grad)
            for each in cache.caches:
                each.replay_log = AttnWeightsReplayLog()
                each.pad(self._first())
            self._owner.logs = [
                each.replay_log for each in cache.caches if each.replay_log is not None
            ]
            self._owner.checkpoint_bytes = 0
            self._owner.right = None
            self._models = cache.caches
            self._open_spill()
            with self._attending(cache):
                for at in range(len(self._steps)):
                    self._read_step(at)
        self._note_bytes(0)

    def _open_spill(self) -> None:
        """Create the files for checkpoints, if configured."""
        folder, inner = self._grad.checkpoint_dir, rows(len(self._decoder.layers), self._grad)[1:]
        if folder is None or self._scale is None or not inner:
            return
        width, itemsize = self._decoder.config.hidden_size, self._decoder.model.dtype.itemsize
        sizes: list[int] = []
        for step in self._steps:
            numbers = len(self._ids) * len(step) * width
            whole = coded_bytes(numbers, width, itemsize, self._grad.layercp_qname)
            # Codes, scales and zero points are separate tensors in the files.
            scale_bytes = 0 if self._grad.layercp_qname is None else numbers // block_of(width) * 4
            sizes += [whole - 2 * scale_bytes, *([scale_bytes] * 2 if scale_bytes else [])]
        self._spill = Spill(folder, sizes * len(inner))

    def close(self) -> None:
        """Release memory and files."""
        self._pool.reset()
        if self._spill is not None:
            self._spill.close()

    def _read_step(self, at: int) -> None:
        decoder = self._decoder
        ids = self._ids[:, self._steps[at].start : self._steps[at].stop]
        hidden = decoder.embed(ids)
        rotation = self._rotation(at, hidden)
        checkpointed = {each.start for each in rows(len(decoder.layers), self._grad)} - {0}
        for layer in range(len(decoder.layers)):
            if layer in checkpointed and self._scale is not None:
                inputs = self._inputs.setdefault(layer, [])
                inputs.append(Checkpoint(hidden, self._pool, self._grad.layercp_qname, self._spill))
            hidden = decoder.run(layer, at, hidden, rotation)
        self._seeds.append(self._judge(at, hidden))

    def _judge(self, at: int, hidden: torch.Tensor) -> Checkpoint | None:
        """Add the losses of a step. Return the gradient of the top layer's output, None for 0."""
        head, step = self._head, self._steps[at]
        begin = self._ids.shape[1] - self._targets.shape[1]  # the first output with a target
        start = step.start if head.needs_prompt else max(step.start, begin)
        if start >= step.stop:
            return None
        found = torch.zeros_like(hidden) if self._scale is not None else None
        seen = False
        # Logits of a long step would be the largest array, so the head gets them in pieces.
        size = self._settings.chunk_size
        for lo in range(start, step.stop, size):
            hi = min(step.stop, lo + size)
            targets = self._targets[:, max(0, lo - begin) : hi - begin] if hi > begin else None
            with torch.set_grad_enabled(found is not None):
                part = hidden[:, lo - step.start : hi - step.start].detach()
                part.requires_grad_(found is not None)
                outputs = self._decoder.outputs(part, logits=head.needs_logits)
                losses: torch.Tensor = head(outputs, targets, lo)
                loss = (losses / self._entries).mean()
                if loss.requires_grad:
                    (loss * (self._scale or 0.0)).backward()
            self.loss = self.loss + loss.detach()
            self._count(outputs.detach(), targets)
            if found is not None and part.grad is not None:
                found[:, lo - step.start : hi - step.start] = part.grad
                seen = True
        return Checkpoint(found, self._pool) if found is not None and seen else None

    def _count(self, outputs: torch.Tensor, targets: torch.Tensor | None) -> None:
        """Count the targets predicted by the outputs."""
        right = None if targets is None else self._head.right(outputs, targets)
        if right is not None:
            before = self._owner.right
            self._owner.right = right if before is None else before + right

    # -------------------------------------------------------------------------- backward phase

    def run_row(self, layers: range) -> None:
        """Run a row of cells for the gradients of its parameters and inputs."""
        cells = [self._cell(layer) for layer in layers]
        row = _Row(layers, cells)
        starts = self._find_starts(layers, cells, row)
        self._note_bytes(sum(each.nbytes for start in starts for each in start if each is not None))
        seeds: list[Checkpoint | None] = [None] * len(self._steps)
        self._bring(layers, self._cells[-1], starts[-1])
        while starts:
            begin = starts.pop()
            for cell, start in zip(cells, begin, strict=True):
                cell.begin(None if start is None else start.take())
                cell.differentiate()
            column = self._cells[len(starts)]
            if starts:  # copy in parallel with this cell's computation
                self._bring(layers, self._cells[len(starts) - 1], starts[-1])
            with torch.enable_grad(), self._attending(row, grad=True):
                self._run_cell(layers, cells, column, seeds)
        self._inputs.pop(layers.start, None)
        for at in range(len(self._seeds)):  # gradients not used by any cell
            self._give_up(self._seeds, at)
        self._seeds = seeds
        self._note_bytes(0)

    def _cell(self, layer: int) -> CellCache | WindowCell:
        owner, model = self._owner, self._models[layer]
        if model.span is not None:
            return WindowCell(model, forward_gb=owner.forward_gb)
        log = owner.logs[layer]
        return CellCache(model, log, forward_gb=owner.forward_gb, backward_gb=owner.backward_gb)

    def _find_starts(
        self, layers: range, cells: Sequence[CellCache | WindowCell], row: _Row
    ) -> list[list[_KeptStart | None]]:
        """Return K and V at the start of each cell, by layer, None for the first cell."""
        starts: list[list[_KeptStart | None]] = [[None] * len(cells)]
        if len(self._cells) == 1:
            return starts
        cells[-1].only_rows = True
        last = self._cells[-1].start
        with torch.no_grad(), self._attending(row):
            for column in self._cells[:-1]:
                for at in column:
                    hidden = self._input(layers, at)
                    if layers.start and at + 1 < last:  # copy in parallel with this step
                        following = self._inputs[layers.start][at + 1]
                        assert following is not None  # noqa: S101 - freed only by its cell
                        following.bring()
                    rotation = self._rotation(at, hidden)
                    try:
                        for layer in layers:
                            hidden = self._decoder.run(layer, at, hidden, rotation)
                    except RowsAreIn:
                        continue
                name = self._grad.cachecp_qname
                starts.append([_KeptStart(cell.start(), self._pool, name) for cell in cells])
        cells[-1].only_rows = False
        return starts

    def _run_cell(
        self,
        layers: range,
        cells: Sequence[CellCache | WindowCell],
        column: range,
        seeds: list[Checkpoint | None],
    ) -> None:
        """Run a cell forwards and backwards, and store the gradients of its inputs in `seeds`."""
        inputs: dict[int, torch.Tensor] = {}
        roots: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for at in column:
            hidden = self._input(layers, at)
            if layers.start:
                hidden = inputs[at] = hidden.requires_grad_()
                self._give_up(self._inputs[layers.start], at)  # replaced by its gradient
            rotation = self._rotation(at, hidden)
            for layer in layers:
                hidden = self._decoder.run(layer, at, hidden, rotation)
            seed = self._seeds[at]
            if seed is not None and hidden.requires_grad:
                roots.append(hidden)
                grads.append(seed.read())
                self._give_up(self._seeds, at)
        for cell in cells:
            for root, grad in cell.ends():
                roots.append(root)
                grads.append(grad)
        torch.autograd.backward(roots, grads)
        for at, hidden in inputs.items():
            if hidden.grad is not None:
                seeds[at] = Checkpoint(hidden.grad, self._pool)

    def _bring(self, layers: range, column: range, start: Sequence[_KeptStart | None]) -> None:
        """Start copying a cell's checkpoints back."""
        for each in start:
            if each is not None:
                each.bring()
        inputs = self._inputs[layers.start] if layers.start else []
        for at in column:
            for checkpoint in (*inputs[at : at + 1], self._seeds[at]):
                if checkpoint is not None:
                    checkpoint.bring()

    @staticmethod
    def _give_up(of: list[Checkpoint | None], at: int) -> None:
        checkpoint = of[at]
        if checkpoint is not None:
            checkpoint.free()
        of[at] = None

    def _input(self, layers: range, at: int) -> torch.Tensor:
        """Return the inputs of a row of cells in a step."""
        if layers.start:
            checkpoint = self._inputs[layers.start][at]
            assert checkpoint is not None  # noqa: S101 - a cell runs once
            return checkpoint.read()
        step = self._steps[at]
        return self._decoder.embed(self._ids[:, step.start : step.stop])

    # ------------------------------------------------------------------------------- in common

    def _rotation(self, at: int, hidden: torch.Tensor) -> Rotation:
        step = self._steps[at]
        if self._columns is not None:
            places = self._columns[:, step.start : step.stop]
        else:
            places = torch.arange(step.start, step.stop, device=hidden.device)[None]
        with torch.no_grad():
            return self._decoder.rotation(hidden, places)

    def _first(self) -> torch.Tensor | None:
        if self._mask is None:
            return None
        return self._mask.shape[1] - (self._mask != 0).sum(dim=1)

    @contextmanager
    def _attending(self, layers: Any, *, grad: bool = False) -> Generator[None]:  # noqa: ANN401
        self._passing.begin(layers, grad=grad)
        try:
            yield
        finally:
            self._passing.end()

    def _note_bytes(self, starts: int) -> None:
        inputs = sum(each.nbytes for row in self._inputs.values() for each in row if each)
        seeds = sum(each.nbytes for each in self._seeds if each is not None)
        owner = self._owner
        owner.checkpoint_bytes = max(owner.checkpoint_bytes, inputs + seeds + starts)


class _KeptStart:
    """A `Start` in host memory."""

    def __init__(self, start: Start, pool: HostPool, quantiser: str | None) -> None:
        self._parts = (
            Checkpoint(start.keys, pool, quantiser),
            Checkpoint(start.values, pool, quantiser),
            Checkpoint(start.token_pos, pool),
        )
        self._numbers = start[3:]

    def bring(self) -> None:
        """Start copying back to the device."""
        for each in self._parts:
            each.bring()

    def take(self) -> Start:
        """Return the start and free its host memory."""
        keys, values, token_pos = (each.read() for each in self._parts)
        for each in self._parts:
            each.free()
        return Start(keys, values, token_pos, *self._numbers)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(each.nbytes for each in self._parts)


def _check(
    input_ids: torch.Tensor, targets: torch.Tensor, attention_mask: torch.Tensor | None
) -> None:
    if input_ids.dim() != 2 or not input_ids.numel():  # noqa: PLR2004 - rows and columns
        raise ConfigError(f"input_ids are {tuple(input_ids.shape)}: rows of tokens are wanted")
    size, total = input_ids.shape
    if targets.dim() != 2 or len(targets) != size or not 0 < targets.shape[1] <= total:  # noqa: PLR2004
        raise ConfigError(
            f"targets are {tuple(targets.shape)}: {size} rows of 1 to {total} targets are wanted"
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask is {tuple(attention_mask.shape)}, {tuple(input_ids.shape)} wanted"
        )
    seen = attention_mask != 0
    if not bool((seen[:, 1:] >= seen[:, :-1]).all()) or not bool(seen[:, -1].all()):
        raise ConfigError("attention_mask hides columns after a row's first token: pad on the left")
