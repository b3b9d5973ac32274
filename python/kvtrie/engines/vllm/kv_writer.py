"""The layout of vLLM's KV, learned through the kernel of its attention backend.

Tiers in a different number format need K and V in the order token, head, number. Every backend has
its own order, so the backend's own kernel writes a test pattern into a block of each layer.
Invariant: only plain K and V of a backend in `BACKENDS` is accepted. Blocks keep their bytes.
Cost: some kernel calls per layer, at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtrie.engines.vllm.layout_check import block_axis
from kvtrie.engines.vllm.learned_views import BlockShape, learned_views
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from vllm.config import VllmConfig

    from kvtrie.engines.vllm.learned_views import WriteRows
    from kvtrie.engines.vllm.model import ServedModel

    Writer: TypeAlias = Callable[[str, torch.Tensor], WriteRows]

__all__ = ["BACKENDS", "Writer", "known_views", "writer_of"]

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER")
"""Attention backends with a kernel writing K and V unchanged."""

_PLAIN = ("float32", "float16", "bfloat16")


def known_views(
    name: str,
    model: ServedModel,
    number: int,
    tensors: Mapping[str, torch.Tensor],
    writer: Writer | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of each layer by token, head and number, as views of vLLM's tensors.

    Args:
        name: the format of the tiers.
        model: the served KV.
        number: the index of the group of layers.
        tensors: vLLM's tensors of this group by layer name.
        writer: returns the kernel for writing into the tensor of a layer.

    Raises:
        ConfigError: KV other than plain K and V, an unknown backend, or a layout without strides.
    """
    group = model.groups[number]
    heads, width, _, latent, dtype = model.shape.form(number if len(model.groups) > 1 else None)
    if latent or dtype not in _PLAIN:
        raise ConfigError(
            f"format {name!r} is for K and V in {', '.join(_PLAIN)}; this server has "
            f"{'latent vectors or codes' if latent else 'K and V'} in {dtype}, which "
            "tiers keep as they are: leave format out"
        )
    if writer is None:
        raise ConfigError(
            f"format {name!r} wants the attention backend's kernel, and there is none"
        )
    block = BlockShape(model.block_tokens // group.pages, heads, width)
    return [
        learned_views(memory, block_axis(memory, model.blocks), block, writer(layer, memory))
        for layer, memory in tensors.items()
    ]


def writer_of(config: VllmConfig) -> Writer:
    """Return the kernels of a server's layers."""

    def writer(name: str, memory: torch.Tensor) -> WriteRows:
        layer = config.compilation_config.static_forward_context[name]
        backend = layer.attn_backend.get_name()
        if backend not in BACKENDS:
            raise ConfigError(
                f"the layout of KV of the attention backend {backend} is not known, so tiers keep "
                f"it as it is: leave format out, or use one of {', '.join(BACKENDS)}"
            )

        def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, keys, values, memory, slots)

        return write

    return writer
