"""DecoderLayers: the fusor's interface to a model, layer by layer, at any positions.

Each engine with support for fusion implements it, so the fusor knows no engine. Tensors have no
batch axis: a pass is over tokens of a single sequence, at any positions.
Invariant: a layer attends with explicit positions, a token to all keys at positions up to its own.
Cost: the layer's computation over the given tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvtrie.fuse.backing import FusedMemory
    from kvtrie.kernels import Rope

    Merge: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

__all__ = ["DecoderLayers"]


class DecoderLayers(Protocol):
    """A model, layer by layer."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def widths(self) -> tuple[int, int, int]:
        """KV heads, numbers per head of K, and of V."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The format of hidden states, K and V."""
        ...

    @property
    def device(self) -> torch.device:
        """The device it computes on."""
        ...

    @property
    def vocabulary(self) -> int:
        """Size of the embedding table: the end of the token ids."""
        ...

    def identity(self) -> object:
        """Return a value to compare models: equal for the same weights and adapters."""
        ...

    def ropes(self, length: int) -> Sequence[Rope | None]:
        """Return the rotation tables of each layer for a sequence of `length` tokens.

        cos and sin are fp32 `(length, width / 2)` without any scale, so R(q) R(p)^-1 rotates a key
        from position p to q (RoFormer, equation 15). None for a layer without rotation. Layers with
        equal tables share an object.
        """
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `(n, hidden)` before layer 0 of tokens, int64 `(n,)`."""
        ...

    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        merge: Merge,
        *,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer for some tokens.

        Args:
            index: index of the layer.
            hidden: `(n, hidden)`, states before it.
            positions: int64 `(n,)`, ascending, of the tokens.
            length: tokens of the sequence, the number of keys.
            merge: takes the tokens' K `(n, kv_heads, head_dim)`, rotated to their positions, and V.
                Returns K and V of the whole sequence, in the order of positions.
            weights: fp32 `(length,)`, to which the attention to each key is added, summed over the
                tokens and all query heads. None does not compute it.

        Returns:
            Output `(n, hidden)` of the layer.
        """
        ...

    def project(
        self, index: int, hidden: torch.Tensor, positions: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of some tokens at a layer, without running it.

        Args:
            index: index of the layer.
            hidden: `(n, hidden)`, states before it.
            positions: int64 `(n,)`, the positions of K.
            length: tokens of the sequence. Some models choose their tables by it.

        Returns:
            K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)`.
        """
        ...

    def values(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return V of some tokens at a layer: only its norm and `v_proj` run.

        Args:
            index: index of the layer.
            hidden: `(n, hidden)`, states before it.

        Returns:
            V `(n, kv_heads, v_head_dim)`.
        """
        ...

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits `(vocabulary,)` after the last token, by the engine's own full pass."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits `(n, vocabulary)` of the last layer's output."""
        ...

    def cache(self, kv: FusedMemory, length: int) -> Any:  # noqa: ANN401 - each engine has its own
        """Return the engine's cache object over a fused cache.

        Args:
            kv: the memory. The engine appends to it.
            length: number of tokens in it.
        """
        ...
