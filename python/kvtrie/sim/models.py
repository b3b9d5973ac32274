"""Shapes of models by name, in bfloat16, for replays with rooms in bytes.

Invariant: a shape has the layer groups of the published configuration. Cost: none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.model.layer_group import LayerGroup
from kvtrie.model.shape import ModelShape
from kvtrie.settings.argument import word

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODELS", "model_named", "without_groups"]

# A Gated DeltaNet layer: 32 heads of a 128 x 128 state in fp32, and 4 rows of 8192 in bfloat16.
_DELTA_STATE = 32 * 128 * 128 * 4 + 4 * 8192 * 2


def _every(layers: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the last layer of every `step`, and the remaining layers."""
    full = tuple(range(step - 1, layers, step))
    return full, tuple(at for at in range(layers) if at not in set(full))


def _gemma_3_27b() -> ModelShape:
    full, local = _every(62, 6)
    return ModelShape(
        layers=62,
        kv_heads=16,
        head_dim=128,
        dtype="bfloat16",
        query_heads=32,
        hidden=5376,
        groups=(LayerGroup(full), LayerGroup(local, kind="sliding", window=1024)),
    )


def _gpt_oss_120b() -> ModelShape:
    full, local = _every(36, 2)
    return ModelShape(
        layers=36,
        kv_heads=8,
        head_dim=64,
        dtype="bfloat16",
        query_heads=64,
        hidden=2880,
        groups=(LayerGroup(full), LayerGroup(local, kind="sliding", window=128)),
    )


def _qwen3_next_80b() -> ModelShape:
    full, linear = _every(48, 4)
    return ModelShape(
        layers=48,
        kv_heads=2,
        head_dim=256,
        dtype="bfloat16",
        query_heads=16,
        hidden=2048,
        groups=(
            LayerGroup(full),
            LayerGroup(linear, kind="state", state_bytes=len(linear) * _DELTA_STATE),
        ),
    )


def _llama_3_1_8b() -> ModelShape:
    return ModelShape(
        layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", query_heads=32, hidden=4096
    )


MODELS: dict[str, Callable[[], ModelShape]] = {
    "gemma-3-27b": _gemma_3_27b,
    "gpt-oss-120b": _gpt_oss_120b,
    "qwen3-next-80b": _qwen3_next_80b,
    "llama-3.1-8b": _llama_3_1_8b,
}
"""Shapes by name."""


def model_named(name: str) -> ModelShape:
    """Return the shape of a model.

    Raises:
        ConfigError: an unknown name. The message lists the known names.
    """
    return MODELS[word("model", name, MODELS)]()


def without_groups(model: ModelShape) -> ModelShape:
    """Return the shape of the same model with all tokens kept in all layers.

    Raises:
        ConfigError: a layer with a state instead of tokens.
    """
    if not model.even:
        raise ConfigError("a model with states cannot keep all layers of all tokens")
    return replace(model, groups=())
