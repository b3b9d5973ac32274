"""Plan: an estimate of the memory and cells of a run before it starts.

Invariant: bytes of checkpoints and buffers equal the run's allocations. Bytes of the graph are
measured with a few tokens of a single layer. Cost: a pass of a layer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch and transformers leave parts untyped)

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.model.shape import ModelShape
from kvtrie.selective import AttnWeightsReplayLog, make_cache
from kvtrie.selective.arguments import CacheArguments
from kvtrie.selective.attention import Passing
from kvtrie.selective.buffers import DefaultBuffers, Place
from kvtrie.selective.names import parse, windows_of
from kvtrie.selective.steps import cut
from kvtrie.selective.window import WindowKVCache
from kvtrie.train.cell import CellCache
from kvtrie.train.cells import columns, rows
from kvtrie.train.checkpoint import coded_bytes
from kvtrie.train.decoder import Decoder
from kvtrie.train.window_cell import WindowCell

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.train.run import Run

__all__ = ["Figures", "figures", "plan"]

_TOKENS = 16
_STATES = {"Adam": 2, "AdamW": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1, "SGD": 0}
_POSITION = 4
_SINGLE = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory and cells of a batch.

    Attributes:
        steps: tokens of each step.
        columns: steps of each cell.
        rows: layers of each row of cells.
        weights: bytes of the model.
        trained: bytes of gradients and of the optimiser.
        buffers: bytes of K and V, the larger of the two phases.
        graph: bytes of the widest cell's graph.
        inputs: peak bytes of layer inputs and of gradients of outputs.
        starts: peak bytes of K and V at the starts of cells.
        checkpoints: peak bytes of inputs and starts together.
    """

    steps: list[int]
    columns: list[range]
    rows: list[range]
    weights: int
    trained: int
    buffers: int
    graph: int
    inputs: int
    starts: int
    checkpoints: int

    @property
    def device(self) -> int:
        """Bytes on the model's device."""
        return self.weights + self.trained + self.buffers + self.graph


def figures(
    model: PreTrainedModel, run: Run, total: int, *, targets: int = 1, per_token: int | None = None
) -> Figures:
    """Compute the figures of a batch.

    Args:
        model: model without adapters.
        run: settings.
        total: tokens of the longest sequence.
        targets: number of last outputs with targets.
        per_token: bytes of the graph per token and layer. None measures them.
    """
    decoder = Decoder(model)
    shape = ModelShape.from_config(model.config)
    batch, layers = run.train.micro_batch_size, len(decoder.layers)
    hidden, itemsize = model.config.hidden_size, model.dtype.itemsize
    lengths = run.kv_cache.cache_length
    lengths = [lengths] * layers if isinstance(lengths, int) else list(lengths)
    windows = windows_of(shape)
    lengths = [windows.get(at, length) for at, length in enumerate(lengths)]
    steps = cut(_caches(run, shape, lengths), run.kv_cache, 0, total)
    chosen = [length for at, length in enumerate(lengths) if at not in windows]
    cells = columns(steps, min(chosen or lengths), run.grad)
    tiles = rows(layers, run.grad)
    heads, dim = shape.kv_heads, shape.head_dim
    coded = make_cache(
        run.kv_cache.name,
        batch=1,
        kv_heads=heads,
        query_heads=shape.query_heads or heads,
        cache_length=64,
        head_dim=dim,
        dtype=model.dtype,
    )
    exact = heads * 2 * dim * itemsize  # bytes of an exact row
    reading = batch * sum(length * coded.buffers.nbytes // 64 for length in chosen)
    reading += batch * exact * sum(windows.values())
    if chosen and not coded.buffers.exact:
        reading += batch * exact * max(chosen)
    each = 2 * dim * (itemsize + _SINGLE) + _POSITION
    working = max(sum(lengths[at] for at in layer) for layer in tiles) * batch * heads * each
    widest = max(sum(steps[at] for at in column) for column in cells)
    found = _per_token(decoder, shape) if per_token is None else per_token
    graph = found * widest * batch * max(len(layer) for layer in tiles)
    # Each step's graph keeps the rows of a window once.
    most = max(sum(windows.get(at, 0) for at in layer) for layer in tiles)
    graph += batch * exact * most * max(map(len, cells))
    inputs, starts, worst = _checkpoints(
        run, tiles, cells, steps, lengths, (batch, heads, dim, hidden, itemsize), targets
    )
    return Figures(
        steps=steps,
        columns=cells,
        rows=tiles,
        weights=sum(each.numel() * each.element_size() for each in model.parameters()),
        trained=_trained(model, run),
        buffers=max(reading, working),
        graph=graph,
        inputs=inputs,
        starts=starts,
        checkpoints=worst,
    )


def _checkpoints(  # noqa: PLR0917 - made by `figures` alone
    run: Run,
    tiles: list[range],
    cells: list[range],
    steps: list[int],
    lengths: list[int],
    sizes: tuple[int, int, int, int, int],
    targets: int,
) -> tuple[int, int, int]:
    batch, heads, dim, hidden, itemsize = sizes
    total = sum(steps)
    plain = batch * total * hidden
    coded = coded_bytes(plain, hidden, itemsize, run.grad.layercp_qname)
    if run.grad.checkpoint_dir is not None:
        coded = 0  # in files
    begins = [sum(steps[: column.start]) for column in cells[1:]]
    # Gradients are kept for whole steps, from the first step with targets.
    with_targets = total - sum(steps[: _first_of(steps, total - targets)])
    most_inputs = most_starts = worst = 0
    for at, layers in enumerate(tiles):
        starts = 0
        for begin in begins:
            for layer in layers:
                filled = min(begin, lengths[layer])
                numbers = batch * heads * filled * dim
                size = coded_bytes(numbers, dim, itemsize, run.grad.cachecp_qname)
                starts += 2 * size + batch * heads * filled * _POSITION
        top = at == len(tiles) - 1
        seeds = batch * with_targets * hidden * itemsize if top else plain * itemsize
        inputs = at * coded + seeds
        worst = max(worst, inputs + starts)
        most_inputs, most_starts = max(most_inputs, inputs), max(most_starts, starts)
    return most_inputs, most_starts, worst


def _first_of(steps: list[int], position: int) -> int:
    """Return the step of a position."""
    for at in range(len(steps)):
        if sum(steps[: at + 1]) > position:
            return at
    return len(steps)


def _caches(run: Run, shape: ModelShape, lengths: list[int]) -> list[Any]:
    """Return caches without memory, to cut a sequence into steps."""
    kind, _, _ = parse(run.kv_cache.name)
    arguments = CacheArguments.of(run.kv_cache.cache_kwargs)
    made: list[Any] = []
    heads, windows = shape.query_heads or shape.kv_heads, windows_of(shape)
    for at, length in enumerate(lengths):
        place = Place(
            (1, shape.kv_heads, length, shape.head_dim), torch.float32, torch.device("meta")
        )
        if at in windows:
            made.append(WindowKVCache(place, heads))
        else:
            made.append(kind(DefaultBuffers(place), heads, arguments))
    return made


def _per_token(decoder: Decoder, shape: ModelShape) -> int:
    """Measure the bytes of a layer's graph per token."""
    weight = next(decoder.parameters())
    heads, windows = shape.query_heads or shape.kv_heads, windows_of(shape)
    layer = next((at for at in range(shape.layers) if at not in windows), 0)
    made = make_cache(
        "dense-default",
        span=windows.get(layer),
        batch=1,
        kv_heads=shape.kv_heads,
        query_heads=heads,
        cache_length=2 * _TOKENS,
        head_dim=shape.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    log = AttnWeightsReplayLog([_TOKENS], [None])
    cell = CellCache(made, log) if made.span is None else WindowCell(made)
    cell.differentiate()
    storages: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in decoder.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    class _OneLayer:
        caches: Any = MappingProxyType({layer: cell})

    passing = Passing(decoder.config)
    x = torch.zeros(1, _TOKENS, decoder.config.hidden_size, dtype=weight.dtype).to(weight.device)
    decoder.begin(_TOKENS, yarn_rope=False)
    rotation = decoder.rotation(x, torch.arange(_TOKENS, device=x.device)[None])
    passing.begin(_OneLayer(), grad=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            outputs = decoder.run(layer, 0, x.requires_grad_(), rotation)
    finally:
        passing.end()
    del outputs
    return sum(storages.values()) // _TOKENS


def _trained(model: PreTrainedModel, run: Run) -> int:
    """Return the bytes of gradients and of the optimiser's numbers."""
    itemsize = model.dtype.itemsize
    if run.adapts:
        names = set(run.lora.targets())
        maps = [
            each
            for name, each in model.named_modules()
            if name.rpartition(".")[2] in names and isinstance(each, torch.nn.Linear)
        ]
        numbers = sum(run.lora.r * (each.in_features + each.out_features) for each in maps)
        weights = numbers * _SINGLE  # the adapters themselves
        itemsize = _SINGLE
    else:
        numbers, weights = sum(each.numel() for each in model.parameters()), 0
    states = _STATES.get(run.optimizer.name, 2) + int(run.optimizer.momentum is not None)
    return weights + numbers * itemsize * (1 + states)


def plan(model: PreTrainedModel, run: Run, total: int, *, memory_gb: float | None = None) -> str:
    """Describe a plan as text: cells, bytes per kind, and the largest possible number of rows.

    Args:
        model: model without adapters.
        run: settings.
        total: tokens of the longest sequence.
        memory_gb: memory of the device. None takes all its memory.
    """
    found = figures(model, run, total)
    cells = len(found.columns) * len(found.rows)
    widest = max(sum(found.steps[at] for at in column) for column in found.columns)
    lines = [
        (
            f"{total} tokens in {len(found.steps)} steps, {len(found.columns)} columns of up to "
            f"{widest} tokens and {len(found.rows)} rows of {run.grad.layers_per_cell} layers: "
            f"{cells} cells"
        )
    ]
    lines += [f"{label:>34}  {_spoken(getattr(found, name))}" for name, label in _WORDS.items()]
    memory = _memory(model) if memory_gb is None else int(memory_gb * 1e9)
    most = _largest(model, run, total, memory)
    lines.append(f"{'largest cache_length that fits':>34}  {most} in {_spoken(memory)}")
    return "\n".join(lines) + "\n"


_WORDS = {
    "weights": "weights",
    "trained": "gradients and optimiser",
    "buffers": "K and V at work",
    "graph": "graph of a cell, measured",
    "inputs": "layer inputs, in host memory",
    "starts": "K and V of starts, in host memory",
    "checkpoints": "both at the worst moment",
}


def _memory(model: PreTrainedModel) -> int:
    if model.device.type == "cuda":
        return torch.cuda.get_device_properties(model.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _largest(model: PreTrainedModel, run: Run, total: int, memory: int) -> int:
    """Return the largest number of rows for a batch to fit, up to the sequence's tokens, or 0."""
    shape = ModelShape.from_config(model.config)
    per_token = _per_token(Decoder(model), shape)
    on_cpu = model.device.type == "cpu"

    def fits(length: int) -> bool:
        cache = replace(run.kv_cache, cache_length=length)
        try:
            made = figures(model, replace(run, kv_cache=cache), total, per_token=per_token)
        except ConfigError:
            return False  # fewer rows than the policy's arguments need
        return made.device + (made.checkpoints if on_cpu else 0) <= memory

    if fits(total):  # the only number of rows for a dense cache
        return total
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _spoken(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
