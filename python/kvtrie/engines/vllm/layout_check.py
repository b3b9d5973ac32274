"""Name the layout of vLLM's KV by the bytes its own kernel writes.

A shape and a dtype do not determine the position of a number: CPU kernels arrange K by processor,
GPU kernels by backend and version. So at start the kernel of each layer writes fixed rows into a
block, and the bytes of this block are part of the name of KV.
Invariant: kernels with different positions for a number have different names. The block has its
old bytes afterwards. If a layer's kernel cannot be called separately, the layer is named only by
its classes. Cost: a kernel call per layer, at start.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

__all__ = ["block_axis", "layouts_digest"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)


def layouts_digest(
    config: VllmConfig, tensors: Mapping[str, Any], blocks: int, block_tokens: Mapping[str, int]
) -> bytes:
    """Return a 32-byte digest of the layouts of a rank's layers.

    Args:
        config: vLLM's configuration.
        tensors: the tensor of each layer, by vLLM's name of the layer.
        blocks: blocks of a tensor.
        block_tokens: tokens of a block, by vLLM's name of the layer. A layer without an entry
            shares the tensor of a listed layer.
    """
    whole, unknown = hashlib.blake2b(digest_size=32), set[str]()
    least = min(block_tokens.values(), default=1)
    for name, memory in tensors.items():
        layer: Any = config.compilation_config.static_forward_context.get(name)
        kinds: list[type] = [type(layer), type(getattr(layer, "impl", None))]
        about = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
        whole.update(f"{name} {about} ".encode())
        if not isinstance(memory, torch.Tensor):  # states of a recurrent layer
            unknown.add(f"{about[1]}: no tensor")
            continue
        axis = memory.shape.index(blocks) if blocks in memory.shape[:3] else 0
        block = memory.detach().movedim(axis, 0)[0]
        whole.update(f"{block.dtype} {tuple(block.shape)} ".encode())
        before = block.clone()
        try:
            block.zero_()
            _write(layer, memory, block_tokens.get(name, least), config.model_config.dtype)
            found = block.contiguous().reshape(-1, 1).view(torch.uint8).cpu()
            whole.update(found.numpy().tobytes())
        except _FAILURES as error:
            unknown.add(f"{about[1]}: {error}")
        finally:
            block.copy_(before)
    for why in sorted(unknown):
        _LOG.info("kvtrie: the layout of KV is named by the class of its kernel only: %s", why)
    return whole.digest()


def _write(layer: Any, memory: torch.Tensor, count: int, dtype: torch.dtype) -> None:  # noqa: ANN401 - a layer of vLLM
    """Write fixed rows into the first tokens of a layer's tensor, with its own kernel."""
    slots = torch.arange(count, device=memory.device)
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        drawn = torch.randn((count, *shape), generator=generator)
        return drawn.to(dtype).to(memory.device)

    if layer.attn_backend.is_mla():
        latent, rotated = rows(layer.kv_lora_rank), rows(1, layer.qk_rope_head_dim)
        about = layer.kv_cache_dtype, layer._k_scale  # noqa: SLF001 - as in vLLM's own call
        layer.impl.do_kv_cache_update(latent, rotated, memory, slots, *about)
        return
    keys = rows(layer.num_kv_heads, layer.head_size)
    values = rows(layer.num_kv_heads, getattr(layer, "head_size_v", layer.head_size))
    layer.impl.do_kv_cache_update(layer, keys, values, memory, slots)


def block_axis(tensor: torch.Tensor, blocks: int) -> int:
    """Return the axis of vLLM's blocks in a tensor.

    Raises:
        ConfigError: no axis of the tensor has this size.
    """
    for axis, size in enumerate(tensor.shape[:3]):
        if size == blocks:
            return axis
    raise ConfigError(
        f"a tensor of shape {tuple(tensor.shape)} has no axis of vLLM's {blocks} blocks: blocks "
        "that a kernel splits further are not supported"
    )
