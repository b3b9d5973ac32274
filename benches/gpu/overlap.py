"""Overlap: the share of loading KV layer by layer that overlaps the computation of real layers.

A layer is that of an 8B Llama: projections, RoPE, attention of fresh tokens over loaded and fresh
ones, and the gated MLP. While layer i computes, the next two come from pinned memory on a separate
stream: as one piece, scattered into pages by a kernel, or as the blocks that they are.

    hidden = (load alone + compute alone - both together) / load alone

A layer waits for its KV where its attention begins: queries and fresh keys are ready by then. All
three are replayed from graphs, so that Python's time for starting kernels stays out, then once more
as Python starts them. Each repeats before it is timed until the card's power limit has set its
clock. The first load can overlap only one layer's projections.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from benches.gpu.clock import Row
from kvtrie.kernels import Pages, Rope, copy_rows, gather, recompute, scatter
from kvtrie.kernels.launch import start
from kvtrie.kernels.rows import launches
from kvtrie.model.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benches.gpu.clock import Clock

GOAL = 0.9
LOOK_AHEAD = 2
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """Of a layer."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    inner: int = 14336
    layers: int = 32
    cached: int = 8192


class Model:
    """Layers that share their weights, the pages of each, and the KV to load."""

    def __init__(self, clock: Clock, size: Size, fresh: int, way: str) -> None:
        self.clock, self.size, self.fresh, self.way = clock, size, fresh, way
        device, dtype = clock.device, torch.bfloat16

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5

        kv, queries = size.kv_heads * size.dim, size.heads * size.dim
        self.queries, self.out = weight(queries, size.hidden), weight(size.hidden, queries)
        self.joined = weight(2 * kv, size.hidden)
        self.gate, self.up = weight(size.inner, size.hidden), weight(size.inner, size.hidden)
        self.down = weight(size.hidden, size.inner)
        self.tokens = torch.randn(fresh, size.hidden, device=device, dtype=dtype)
        total, block = size.cached + fresh, 16
        blocks = -(-total // block)
        layout = Layout(dtype="bfloat16")
        [layer_bytes] = layout.planes(block, size.kv_heads, size.dim)
        sizes = {"blocks": blocks, "block_tokens": block, "heads": size.kv_heads}
        self.memory = [
            torch.zeros((blocks, layer_bytes), dtype=torch.uint8, device=device)
            for _ in range(size.layers)
        ]
        self.pages = [
            Pages.of([memory.view(-1)], layout, **sizes, head_dim=size.dim)
            for memory in self.memory
        ]
        self.order = torch.randperm(blocks)
        slots = self.order[:, None] * block + torch.arange(block)
        self.slots = slots.view(-1)[:total].to(device)
        self.positions = torch.arange(size.cached, total, device=device)
        self.rope = Rope.of(total, size.dim, theta=500_000.0, device=device)
        shape = (2, size.cached, size.kv_heads, size.dim)
        self.source = torch.randn(shape).to(dtype)
        self.blocks = torch.randint(0, 64, (size.cached // block, layer_bytes), dtype=torch.uint8)
        self.scattered = np.random.default_rng(0).permutation(len(self.blocks))
        self.places = self.order[: len(self.blocks)].numpy()
        self.copies = []
        if clock.cuda:
            self.source, self.blocks = self.source.pin_memory(), self.blocks.pin_memory()
            self.copies = [
                list(launches(self.blocks, self.scattered, memory, self.places, memory.device))
                for memory in self.memory
            ]
        self.staging = torch.empty((LOOK_AHEAD, *shape), device=device, dtype=dtype)
        self.context = torch.empty((2, total, *shape[2:]), device=device, dtype=dtype)
        self.loading = clock.stream()

    def load(self, layer: int) -> None:
        """Bring one layer's KV into its pages, in the current stream."""
        if self.way == "blocks" and self.copies:  # rows' numbers are on the card already
            for what in self.copies[layer]:
                start("paged_copy", what, self.memory[layer].device)
            return
        if self.way == "blocks":
            copy_rows(self.blocks, self.scattered, self.memory[layer], self.places)
            return
        rows = self.staging[layer % LOOK_AHEAD]
        rows.copy_(self.source, non_blocking=True)
        scatter(self.pages[layer], self.slots[: self.size.cached], rows[0], rows[1])

    def compute(
        self, x: torch.Tensor, layer: int, loaded: torch.cuda.Event | None = None
    ) -> torch.Tensor:
        """One layer over the fresh tokens; attention waits until the others are `loaded`."""
        size, fresh = self.size, self.fresh
        normed = functional.rms_norm(x, (size.hidden,))
        joined = (normed @ self.joined.T).view(fresh, 2, size.kv_heads, size.dim)
        recompute(
            self.pages[layer],
            self.slots[size.cached :],
            joined[:, 0],
            joined[:, 1],
            positions=self.positions,
            rope=self.rope,
        )
        queries = (normed @ self.queries.T).view(fresh, size.heads, size.dim)
        if loaded is not None:
            torch.cuda.current_stream(self.clock.device).wait_event(loaded)
        gather(self.pages[layer], self.slots, self.context[0], self.context[1])
        keys, values = (each.transpose(0, 1)[None] for each in self.context)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, enable_gqa=True
        )
        x = x + mixed[0].transpose(0, 1).reshape(fresh, -1) @ self.out.T
        normed = functional.rms_norm(x, (size.hidden,))
        return x + (functional.silu(normed @ self.gate.T) * (normed @ self.up.T)) @ self.down.T

    def loads(self) -> None:
        """All loads, one after another."""
        for layer in range(self.size.layers):
            self.load(layer)

    def computes(self) -> None:
        """All layers, one after another."""
        x = self.tokens
        for layer in range(self.size.layers):
            x = self.compute(x, layer)

    def both(self) -> None:
        """Layer i computes once its load is there, while the next ones load."""
        if self.loading is None:
            self.loads()
            self.computes()
            return
        current = torch.cuda.current_stream(self.clock.device)
        self.loading.wait_stream(current)
        ready: list[torch.cuda.Event] = []
        x = self.tokens
        for layer in range(self.size.layers):
            with torch.cuda.stream(self.loading):
                while len(ready) < min(layer + 1 + LOOK_AHEAD, self.size.layers):
                    self.load(len(ready))
                    ready.append(self.loading.record_event())
            x = self.compute(x, layer, ready[layer])


def measure(clock: Clock, size: Size, tokens: tuple[int, ...]) -> Iterator[Row]:
    """Several numbers of fresh tokens: from less to more computation than load."""
    for way in ("piece", "blocks"):
        for fresh in tokens:
            model = Model(clock, size, fresh, way)
            works = (model.loads, model.computes, model.both)
            load, compute, both, hidden = _timed(clock, [clock.replayed(work) for work in works])
            what = f"{fresh} fresh tokens, by {way}: compute = {compute / load:.2f} load"
            goal = GOAL if compute >= load else None
            yield Row(what, both * 1e3, "ms", "hidden share of the load", hidden, goal)
            _, _, both, hidden = _timed(clock, works)
            yield Row("  started by Python", both * 1e3, "ms", "hidden share of the load", hidden)


def _timed(clock: Clock, works: Sequence[Callable[[], None]]) -> tuple[float, ...]:
    """Median seconds of loads, computations and both, and of the share hidden in each round."""
    rounds = [[clock.steady(work) for work in works] for _ in range(ROUNDS)]
    shares = [(load + compute - both) / load for load, compute, both in rounds]
    return *map(statistics.median, zip(*rounds, strict=True)), statistics.median(shares)
