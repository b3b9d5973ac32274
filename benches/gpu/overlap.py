"""Overlap: how much of loading KV layer by layer hides behind the computation of real layers.

A layer is that of an 8B Llama: projections, RoPE, attention of fresh tokens over loaded and fresh
ones, and the gated MLP. Layer i + 1 is copied from pinned memory to staging and scattered into
pages on a stream of its own while layer i computes.

    hidden = (load alone + compute alone - both together) / load alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benches.gpu.clock import Row
from kvtrie.kernels import Pages, Rope, gather, recompute, scatter
from kvtrie.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.gpu.clock import Clock

GOAL = 0.9
LOOK_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Size:
    """Of a layer."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    inner: int = 14336
    layers: int = 24
    cached: int = 8192


class Model:
    """Layers that share their weights, the pages of each, and the KV to load."""

    def __init__(self, clock: Clock, size: Size, fresh: int) -> None:
        self.clock, self.size, self.fresh = clock, size, fresh
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
        self.pages = [
            Pages.of(
                [torch.zeros(blocks * layer_bytes, dtype=torch.uint8, device=device)],
                layout,
                **sizes,
                head_dim=size.dim,
            )
            for _ in range(size.layers)
        ]
        self.slots = torch.randperm(blocks * block, device=device)[:total]
        self.positions = torch.arange(size.cached, total, device=device)
        self.rope = Rope.of(total, size.dim, theta=500_000.0, device=device)
        shape = (2, size.cached, size.kv_heads, size.dim)
        self.source = torch.randn(shape).to(dtype)
        if clock.cuda:
            self.source = self.source.pin_memory()
        self.staging = torch.empty((LOOK_AHEAD, *shape), device=device, dtype=dtype)
        self.context = torch.empty((2, total, *shape[2:]), device=device, dtype=dtype)
        self.loading = clock.stream()

    def load(self, layer: int) -> None:
        """Bring one layer's KV into its pages, in the current stream."""
        rows = self.staging[layer % LOOK_AHEAD]
        rows.copy_(self.source, non_blocking=True)
        scatter(self.pages[layer], self.slots[: self.size.cached], rows[0], rows[1])

    def compute(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """One layer over the fresh tokens."""
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
        gather(self.pages[layer], self.slots, self.context[0], self.context[1])
        queries = (normed @ self.queries.T).view(fresh, size.heads, size.dim)
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
        ready = []
        with torch.cuda.stream(self.loading):
            for layer in range(self.size.layers):
                self.load(layer)
                ready.append(self.loading.record_event())
        x = self.tokens
        for layer, event in enumerate(ready):
            current.wait_event(event)
            x = self.compute(x, layer)


def measure(clock: Clock, size: Size, tokens: tuple[int, ...]) -> Iterator[Row]:
    """Several numbers of fresh tokens: from less to more computation than load."""
    for fresh in tokens:
        model = Model(clock, size, fresh)
        load = clock.seconds(model.loads, graph=False)
        compute = clock.seconds(model.computes, graph=False)
        both = clock.seconds(model.both, graph=False)
        hidden = (load + compute - both) / load
        what = f"{fresh} fresh tokens, compute = {compute / load:.2f} load"
        goal = GOAL if compute >= load else None
        yield Row(what, both * 1e3, "ms", "hidden share of the load", hidden, goal)
