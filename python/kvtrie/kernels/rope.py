"""Rope: tables of cosines and sines for rotary position embedding.

A pair of numbers (x, y) at position p is rotated by the angle p * w_j (RoFormer, equation 15, with
w_j = theta^(-2j / width)): x' = x cos - y sin, y' = y cos + x sin. Kernels use tables instead of
theta, because the large angle of a late position loses fp32 digits. Tables are computed once, in
fp64, and support every scaling of the frequencies (linear, NTK-aware, YaRN).
Invariant: row p of the tables belongs to position p. Cost: 4 * width bytes per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Rope"]

_AXES = ("length", "width / 2")


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Tables for the rotation of keys.

    Attributes:
        cos: fp32 `(length, width / 2)`.
        sin: like `cos`.
        first: offset of the rotary part in the head. The part is at the start or end of the head.
        neighbours: whether numbers 2j and 2j + 1 are a pair (GPT-J, DeepSeek), instead of j and
            j + width / 2 (GPT-NeoX, Llama).

    Raises:
        ConfigError: tables of wrong types or different shapes.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    first: int = 0
    neighbours: bool = False

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if (
                table.dtype != torch.float32
                or len(table.shape) != len(("length", "pairs"))
                or not table.is_contiguous()
            ):
                raise ConfigError(
                    f"{name} is {table.dtype} {tuple(table.shape)}, contiguous float32 "
                    "(length, width / 2) wanted"
                )
        if self.cos.shape != self.sin.shape or self.cos.device != self.sin.device:
            raise ConfigError(
                f"cos is {tuple(self.cos.shape)} on {self.cos.device}, "
                f"sin {tuple(self.sin.shape)} on {self.sin.device}"
            )
        if self.first < 0:
            raise ConfigError(f"first is {self.first}, at least 0 wanted")

    @classmethod
    def of(
        cls,
        length: int,
        width: int,
        *,
        theta: float = 10_000.0,
        first: int = 0,
        neighbours: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return tables for positions 0 to `length - 1` and `width` numbers of a head.

        Raises:
            ConfigError: an odd width, or a length below 1.
        """
        if width < 1 or width % 2 or length < 1:
            raise ConfigError(f"tables for {length} positions of {width} numbers cannot be")
        pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.arange(length, dtype=torch.float64)[:, None] * theta**-pairs
        cos, sin = (each.float().to(device) for each in (angles.cos(), angles.sin()))
        return cls(cos, sin, first, neighbours)

    @property
    def part(self) -> slice:
        """The rotary part of a head."""
        return slice(self.first, self.first + self.width)

    @property
    def length(self) -> int:
        """Number of positions in the tables."""
        return self.cos.shape[0]

    @property
    def width(self) -> int:
        """Number of rotated numbers of a head."""
        return 2 * self.cos.shape[1]
