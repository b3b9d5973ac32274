"""Verbs: the operations on paged KV, first checked, then run by kernels or by their twins.

Invalid slots and positions on the CPU are refused. On the device the kernel skips them, and the
result flags them.
Invariant: a call with an error has written nothing. Cost: a launch for K and V and all layers of
the pages, two if K and V differ in width or strides. The CPU's twins take several passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import checks, twin
from kvtrie.kernels.call import Call, Kernel
from kvtrie.kernels.launch import launch, step_format
from kvtrie.kernels.pages import Plane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.kernels.pages import Pages
    from kvtrie.kernels.rope import Rope

__all__ = ["Recomputed", "gather", "recompute", "rerotate", "scatter"]

_AXES = 4  # of a single layer's plane
_SEEN: WeakKeyDictionary[Pages, dict[int, tuple[Plane, ...]]] = WeakKeyDictionary()


class Recomputed(NamedTuple):
    """Result of `recompute`.

    Attributes:
        skipped: uint8 `(n,)`, 1 for skipped tokens.
        deviation: fp32 `(planes, n)`, per token the squared distance from the old numbers. None if
            not requested.
    """

    skipped: torch.Tensor
    deviation: torch.Tensor | None


def gather(
    pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy tokens out of their slots, into rows of fp32, fp16 or bf16.

    Args:
        pages: the source.
        slots: integers `(n,)`.
        keys: K `(n, heads, head_dim)`, or latent vectors, written. Heads may be strided. For pages
            of several layers `(layers, n, heads, head_dim)`.
        values: V, like `keys`. None for latent pages.

    Returns:
        uint8 `(n,)`, 1 for a slot out of range with its row unchanged.

    Raises:
        ConfigError: arguments not supported by the kernels. Nothing is written then.
    """
    return _rows("paged_gather", pages, slots, keys, values)


def scatter(
    pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy rows of tokens into their slots, in the pool's format. See `gather` for arguments.

    Slots must differ. Codes are `narrow(x * (1 / scale))`. A scale computed per slot is
    `max(largest |x| / largest code, 2^-126)`.

    Returns:
        uint8 `(n,)`, 1 for a slot out of range, not written.

    Raises:
        ConfigError: arguments not supported by the kernels. Nothing is written then.
    """
    return _rows("paged_scatter", pages, slots, keys, values)


def rerotate(pages: Pages, slots: torch.Tensor, deltas: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate keys in place, each by `delta` positions, in fp32.

    R(p + delta) = R(delta) R(p): a key at position p becomes the key at p + delta. The tables must
    be pure rotations (cos^2 + sin^2 = 1).

    Args:
        pages: pages with the keys (or latent vectors).
        slots: integers `(n,)`, all different.
        deltas: integers `(n,)`, above -length and below length of the tables.
        rope: the model's tables.

    Returns:
        uint8 `(n,)`, 1 for a slot or delta out of range with the key unchanged.

    Raises:
        ConfigError: keys stored without rotation, or arguments not supported by the kernels.
            Nothing is written then.
    """
    if not pages.rotated:
        raise ConfigError("keys of this layout are stored unrotated: there is nothing to turn")
    plane = pages.planes[0]
    tokens, device = _tokens(slots), plane.cells.device
    step = checks.vector(step_format(plane.cells.dtype))
    keys = _checked(pages, step)[:1]
    checks.check_rope(rope, plane, step)
    where = checks.check_indices("slots", slots, tokens, (0, plane.capacity), device, distinct=True)
    bounds = (1 - rope.length, rope.length)
    rotations = checks.check_indices("deltas", deltas, tokens, bounds, device)
    skipped = torch.empty(tokens, dtype=torch.uint8, device=device)
    _run([Call("rerotate", keys, pages.covers, where, skipped, (), rotations, rope)])
    return skipped


def recompute(
    pages: Pages,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    rope: Rope | None = None,
    deviation: bool = False,
) -> Recomputed:
    """Write newly computed tokens to their slots: rotate K, quantise and scatter in a single pass.

    Args:
        pages: the target.
        slots: integers `(n,)`, all different.
        keys: K `(n, heads, head_dim)` before rotation, or latent vectors.
        values: V, like `keys`. None for latent pages.
        positions: integers `(n,)`, each token's position, only with `rope`.
        rope: the model's tables. None stores K as given.
        deviation: whether to measure, per token and plane, the sum of (fresh - old)^2, in fp32 and
            before fresh is rounded.

    Returns:
        The flags of skipped tokens, and the deviation.

    Raises:
        ConfigError: rotation for a layout with unrotated keys, or arguments not supported by the
            kernels. Nothing is written then.
    """
    if rope is not None and not pages.rotated:
        raise ConfigError("keys of this layout are stored unrotated: leave rope out")
    if (rope is None) != (positions is None):
        raise ConfigError("positions and rope come together or not at all")
    if pages.layers is not None:
        raise ConfigError(f"a pass computes layer by layer: these pages are {pages.layers} layers")
    calls = _calls("scatter_fused_recompute", pages, slots, keys, values)
    tokens, device = keys.shape[0], keys.device
    if rope is not None and positions is not None:
        checks.check_rope(rope, pages.planes[0], checks.vector(keys.dtype))
        rotations = checks.check_indices("positions", positions, tokens, (0, rope.length), device)
        calls = [replace(call, rotations=rotations, rope=rope) for call in calls]
    measured = torch.zeros((len(pages.planes), tokens), device=device) if deviation else None
    if measured is not None:
        parts = measured.chunk(len(calls))
        calls = [replace(call, deviation=part) for call, part in zip(calls, parts, strict=True)]
    _run(calls)
    return Recomputed(calls[0].skipped, measured)


def _rows(
    kernel: Kernel,
    pages: Pages,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
) -> torch.Tensor:
    calls = _calls(kernel, pages, slots, keys, values)
    _run(calls)
    return calls[0].skipped


def _calls(
    kernel: Kernel,
    pages: Pages,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
) -> list[Call]:
    given = [keys] if values is None else [keys, values]
    if len(given) != len(pages.planes):
        raise ConfigError(f"{len(given)} tensors of rows for pages of {len(pages.planes)} planes")
    tokens = _tokens(slots)
    for rows, plane in zip(given, pages.planes, strict=True):
        checks.check_rows(rows, plane, tokens)
    planes = [_checked(pages, checks.vector(rows.dtype))[at] for at, rows in enumerate(given)]
    device, capacity = keys.device, pages.planes[0].capacity
    where = checks.check_indices(
        "slots", slots, tokens, (0, capacity), device, distinct=kernel != "paged_gather"
    )
    skipped = torch.empty(tokens, dtype=torch.uint8, device=device)
    nothing = where.new_empty(0)
    if pages.layers is None:
        given = [rows[None] for rows in given]
    together = [slice(0, 1), slice(1, 2)][: len(planes)]
    if len(planes) == 1 or _same_layout(planes, given):
        together = [slice(0, len(planes))]
    return [
        Call(
            kernel,
            tuple(planes[which]),
            pages.covers,
            where,
            skipped,
            tuple(given[which]),
            nothing,
            keys=which.start == 0,
        )
        for which in together
    ]


def _checked(pages: Pages, step: int) -> tuple[Plane, ...]:
    """Return the planes with an axis of layers, checked on their first use with this step."""
    seen = _SEEN.setdefault(pages, {})
    if step not in seen:
        for plane in pages.planes:
            checks.check_plane(plane, pages.covers, step)
        seen[step] = tuple(map(_layered, pages.planes))
    return seen[step]


def _layered(plane: Plane) -> Plane:
    """Return the plane with an axis of layers."""
    if len(plane.cells.shape) > _AXES:
        return plane
    return Plane(plane.cells[None], None if plane.scales is None else plane.scales[None])


def _same_layout(planes: Sequence[Plane], rows: Sequence[torch.Tensor]) -> bool:
    """Return whether a single launch works for two planes: only their addresses differ."""
    cells = [plane.cells for plane in planes]
    scales = [plane.scales for plane in planes if plane.scales is not None]
    return all(
        one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        for one, other in (cells, rows, scales or cells)
    )


def _tokens(slots: torch.Tensor) -> int:
    if slots.dim() != 1:
        raise ConfigError(f"slots are (n,), one per token, not {tuple(slots.shape)}")
    return slots.shape[0]


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        if call.slots.shape[0] == 0:
            continue
        if call.slots.device.type == "cuda":
            launch(call)
        else:
            twin.run(call)
