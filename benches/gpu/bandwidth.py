"""Bandwidth of each kernel, compared with a plain copy on the same card and torch's own indexing.

Bytes count as read plus written, once each. The pool is several times the card's cache, and its
blocks come in random order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benches.gpu.clock import Row
from kvtrie.kernels import Pages, Rope, copy_rows, gather, recompute, rerotate, scatter
from kvtrie.kernels.launch import start
from kvtrie.kernels.rows import launches
from kvtrie.model.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.gpu.clock import Clock

HEADS, DIM = 8, 128
GOAL = 0.8  # of the card's copy speed, at blocks of 16 tokens and more
BLOCKS_OF = (1, 16, 32, 256)
ROW_BYTES = 65_536


class Field:
    """A layer of a pool, as many rows as it has tokens, and the tokens' slots."""

    def __init__(self, clock: Clock, dtype: str, scales: str, tokens: int, block: int) -> None:
        layout = Layout(dtype=dtype, scales=scales)
        blocks = tokens // block
        [size] = layout.planes(block, HEADS, DIM)
        memory = torch.zeros(blocks * size, dtype=torch.uint8, device=clock.device)
        sizes = {"blocks": blocks, "block_tokens": block, "heads": HEADS, "head_dim": DIM}
        self.pages = Pages.of([memory], layout, **sizes)
        order = torch.randperm(blocks)[:, None] * block + torch.arange(block)
        self.slots = order.view(-1).to(clock.device)
        self.keys, self.values = (
            torch.randn(tokens, HEADS, DIM, device=clock.device).bfloat16() for _ in range(2)
        )
        stored = self.pages.planes[0].cells.itemsize * DIM
        stored += 4 if scales == "group" else 0
        self.row_bytes, self.cell_bytes = 2 * tokens * HEADS * 2 * DIM, 2 * tokens * HEADS * stored


def copy_speed(clock: Clock, size: int) -> float:
    """Bytes per second that a plain copy on the device reads and writes."""
    one = torch.empty(size, dtype=torch.uint8, device=clock.device).random_(0, 255)
    other = torch.empty_like(one)
    return 2 * size / clock.seconds(lambda: other.copy_(one))


def measure(clock: Clock, tokens: int) -> Iterator[Row]:
    """Every kernel over `tokens` tokens of 8 heads of 128."""
    speed = copy_speed(clock, 4 * tokens * HEADS * DIM)
    yield Row("copy on the device", speed / 1e9, "GB/s")

    def row(what: str, size: int, seconds: float, goal: float | None = None) -> Row:
        rate = size / seconds
        return Row(what, rate / 1e9, "GB/s", "copy", rate / speed, goal)

    for block in BLOCKS_OF:
        field = Field(clock, "bfloat16", "none", tokens, block)
        pages, slots, rows = field.pages, field.slots, (field.keys, field.values)
        size, goal = field.row_bytes + field.cell_bytes, GOAL if block >= 16 else None
        seconds = clock.seconds(lambda: gather(pages, slots, *rows))  # noqa: B023 - run at once
        yield row(f"gather, blocks of {block}", size, seconds, goal)
        seconds = clock.seconds(lambda: scatter(pages, slots, *rows))  # noqa: B023
        yield row(f"scatter, blocks of {block}", size, seconds, goal)

    yield from _raw(clock, 4 * tokens * HEADS * DIM, speed)
    field = Field(clock, "bfloat16", "none", tokens, 16)
    pages, slots, rows = field.pages, field.slots, (field.keys, field.values)
    size = field.row_bytes + field.cell_bytes
    yield from _torch(clock, field, size, speed)
    rope = Rope.of(8192, DIM, device=clock.device)
    rotations = torch.randint(-100, 100, slots.shape, device=clock.device)
    positions = torch.randint(0, rope.length, slots.shape, device=clock.device)
    seconds = clock.seconds(lambda: rerotate(pages, slots, rotations, rope))
    yield row("rerotate", field.cell_bytes, seconds)
    for deviation in (False, True):
        seconds = clock.seconds(
            lambda: recompute(
                pages,
                slots,
                *rows,
                positions=positions,
                rope=rope,
                deviation=deviation,  # noqa: B023
            )
        )
        what = "recompute, with deviation" if deviation else "recompute"
        yield row(what, size + field.cell_bytes * deviation, seconds)
    for dtype in ("float8_e4m3fn", "int8"):
        field = Field(clock, dtype, "group", tokens, 16)
        pages, slots, rows = field.pages, field.slots, (field.keys, field.values)
        size = field.row_bytes + field.cell_bytes
        seconds = clock.seconds(lambda: gather(pages, slots, *rows))  # noqa: B023
        yield row(f"gather from {dtype}", size, seconds)
        seconds = clock.seconds(lambda: scatter(pages, slots, *rows))  # noqa: B023
        yield row(f"scatter into {dtype}", size, seconds)


def _raw(clock: Clock, size: int, speed: float) -> Iterator[Row]:
    """Rows of raw bytes, from random places to random ones."""
    shape = (size // ROW_BYTES, ROW_BYTES)
    source = torch.randint(0, 255, shape, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    of, to = (np.random.default_rng(seed).permutation(len(source)) for seed in range(2))

    def copy() -> None:
        copy_rows(source, of, target, to)

    started = copy
    if clock.cuda:  # rows' numbers, which a graph cannot bring, are on the card already
        prepared = list(launches(source, of, target, to, source.device))

        def started() -> None:
            for what in prepared:
                start("paged_copy", what, source.device)

    rate = 2 * size / clock.seconds(started)
    yield Row("raw rows of 64 KiB", rate / 1e9, "GB/s", "copy", rate / speed)
    yield Row("raw rows, host time to start", clock.host_seconds(copy) * 1e6, "µs")


def _torch(clock: Clock, field: Field, size: int, speed: float) -> Iterator[Row]:
    """Torch's indexing of whole rows, and our kernel on the same rows."""
    tokens = len(field.slots)
    pools = [torch.zeros(tokens, HEADS * DIM, device=clock.device).bfloat16() for _ in range(2)]
    rows = [each.view(tokens, HEADS * DIM) for each in (field.keys, field.values)]

    def select() -> None:
        for pool, row in zip(pools, rows, strict=True):
            torch.index_select(pool, 0, field.slots, out=row)

    def put() -> None:
        for pool, row in zip(pools, rows, strict=True):
            pool.index_copy_(0, field.slots, row)

    ways = (("gather", gather, "index_select", select), ("scatter", scatter, "index_copy_", put))
    for name, verb, other, theirs in ways:
        seconds = clock.seconds(theirs)
        yield Row(f"torch {other}", size / seconds / 1e9, "GB/s", "copy", size / seconds / speed)
        mine = clock.seconds(lambda: verb(field.pages, field.slots, field.keys, field.values))  # noqa: B023
        yield Row(f"{name} beside {other}", size / mine / 1e9, "GB/s", other, seconds / mine)
        spent = clock.host_seconds(
            lambda: verb(field.pages, field.slots, field.keys, field.values)  # noqa: B023
        )
        yield Row(f"{name}, host time to start", spent * 1e6, "µs")
