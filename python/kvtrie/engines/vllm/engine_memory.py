"""vLLM's KV memory in a worker, as a pool per group of layers.

Invariant: if a lower tier has its own format, the pool's K and V are in the order token, head,
number. Otherwise the layout is opaque. Cost: with a format, some kernel calls per layer at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.engines.vllm.kv_writer import known_views
from kvtrie.engines.vllm.layout_check import block_axis
from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.tiers.engine_pool import EnginePool
from kvtrie.tiers.native_parts import NativeParts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie.engines.vllm.kv_writer import Writer
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings

__all__ = ["engine_memory"]


def engine_memory(
    settings: Settings,
    model: ServedModel,
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    engine: str,
    writer: Writer | None,
) -> EnginePool:
    """Return the pool of the first group of a worker's tensors.

    Args:
        settings: the operator's settings.
        model: the served KV.
        tensors: vLLM's tensors by layer name, several for a recurrent layer.
        engine: the engine's name, version and kind of memory.
        writer: returns the kernel for writing tokens into the tensor of a layer.

    Raises:
        ConfigError: tensors of an unexpected shape, or a format below KV of an unknown layout.
    """
    names = [name for name in (settings.format, settings.disk_format) if name != "native"]
    pool: EnginePool | None = None
    for number, group in reversed([*enumerate(model.groups)]):
        parts = [_tensors(tensors[name]) for name in group.names]
        axis, opaque = block_axis(parts[0][0], model.blocks), ""
        if names and not group.state:
            own = {name: each for name, (each,) in zip(group.names, parts, strict=True)}
            parts = [[*pair] for pair in known_views(names[0], model, number, own, writer)]
            axis = 0
        elif len(model.groups) == 1:
            (first, *_), *_ = parts
            inside = [size for at, size in enumerate(first.shape) if at != axis]
            opaque = f"{engine} {tuple(inside)} {first.dtype}"
        native = NativeFirst.of(settings, model)
        if native.tokens:
            return NativeParts(model.shape, model.block_tokens, parts, parts=native.parts)
        pool = EnginePool(
            model.shape,
            model.block_tokens,
            parts,
            block_axis=axis,
            opaque=opaque,
            pages=1 if group.state else group.pages,
            group=number if len(model.groups) > 1 else None,
            rest=pool,
        )
    assert pool is not None  # noqa: S101 - a model has groups
    return pool


def _tensors(each: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each] if isinstance(each, torch.Tensor) else [*each]
