"""Rotation: moves keys from their old positions to new positions, in fp32.

R(q) R(p)^-1 K(p) = K(q) (RoFormer, equation 15). The angle's cosine and sine come from the tables'
rows p and q by the addition theorems, so they carry the model's own rounding at both positions. At
late positions it is far larger than the rounding of fp32.
Invariant: keys left in place keep their bits. Cost: one pass over the keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from kvtrie.kernels import Rope

__all__ = ["Rotation"]


class Rotation(NamedTuple):
    """Rotation of each key from its old to its new position.

    Attributes:
        rope: the layer's tables.
        cos: fp32 `(n, 1, width / 2)`.
        sin: fp32 `(n, 1, width / 2)`.
    """

    rope: Rope
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def between(cls, rope: Rope, old: torch.Tensor, new: torch.Tensor) -> Rotation:
        """Return the rotation from positions `old` to `new`, int64 `(n,)`, within the tables."""
        cos, sin, was_cos, was_sin = rope.cos[new], rope.sin[new], rope.cos[old], rope.sin[old]
        by_cos, by_sin = cos * was_cos + sin * was_sin, sin * was_cos - cos * was_sin
        return cls(rope, by_cos[:, None], by_sin[:, None])

    @torch.no_grad()
    def into(self, keys: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rotated keys `(n, heads, head_dim)` to `out`, possibly `keys` itself."""
        part = self.rope.part
        if out is not keys and self.rope.width < keys.shape[-1]:
            out.copy_(keys)
        rotary = keys[..., part].float()
        half = self.rope.width // 2
        if self.rope.neighbours:
            first, second = rotary[..., ::2], rotary[..., 1::2]
        else:
            first, second = rotary[..., :half], rotary[..., half:]
        low = first * self.cos - second * self.sin
        high = second * self.cos + first * self.sin
        whole = out[..., part]
        if self.rope.neighbours:
            whole[..., ::2], whole[..., 1::2] = low, high
        else:
            whole[..., :half], whole[..., half:] = low, high
