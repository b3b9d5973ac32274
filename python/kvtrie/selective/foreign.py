"""Buffers of codes by the GPU quantisers of torchao and bitsandbytes.

Invariant: codes of a row depend only on the row. A library is imported when a cache of its name is
created. A missing library or a device without CUDA is an error. Cost: the library's kernels.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch and both libraries leave parts untyped)

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.buffers import CodedBuffers, Place, WorkingCopy
from kvtrie.selective.quantiser import LEAST_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BitsAndBytes", "TorchAo"]

_NIBBLES = 4  # bits of a code if a byte holds two
_BNB_BLOCK = 64  # numbers of the smallest block supported by both kernels
_BNB_LARGEST = 4096


class _Foreign(CodedBuffers, ABC):
    """Base of both libraries: 8 or 4 bits, on a GPU."""

    library = ""
    module = ""

    def __init__(self, place: Place, working: WorkingCopy, *, bits: int) -> None:
        if place.device.type != "cuda":
            raise ConfigError(
                f"buffers of {self.library} need a CUDA device, and this cache is on "
                f"{place.device.type}: torch-quantized{bits} runs everywhere"
            )
        try:
            self._library: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(
                f"buffers of {self.library} need the extra `quant` ({error}): install kvtrie[quant]"
            ) from error
        self._bits = bits
        self._check(place.shape[3])
        super().__init__(place, working)

    @abstractmethod
    def _check(self, dim: int) -> None:
        """Refuse heads of a width not supported by the library."""

    @abstractmethod
    def _extra(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the data kept with the codes: numbers per row, and their format."""

    def _room(self) -> tuple[torch.Tensor, ...]:
        *rows, dim = self.place.shape
        widths = ((dim * self._bits // 8, torch.uint8), *self._extra(dim))
        return tuple(
            torch.zeros((*rows, width), dtype=dtype, device=self.place.device)
            for _ in range(2)
            for width, dtype in widths
        )


class TorchAo(_Foreign):
    """Affine codes of a row with a scale and a zero point, chosen by torchao (ao-*)."""

    library = "torchao"
    module = "torchao.quantization.quant_primitives"

    def _check(self, dim: int) -> None:
        if dim < LEAST_BLOCK or dim % 2:
            raise ConfigError(
                f"heads of {dim} numbers: torchao's blocks take an even number from "
                f"{LEAST_BLOCK} on"
            )

    def _extra(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        del dim
        return (1, torch.float32), (1, torch.int32)

    @property
    def _range(self) -> tuple[torch.dtype, int, int]:
        return torch.uint8, 0, 2**self._bits - 1

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ao, dim = self._library, x.shape[-1]
        rows = x.reshape(-1, dim).float()
        scale, zero = ao.choose_qparams_affine(
            rows,
            ao.MappingType.ASYMMETRIC,
            (1, dim),
            *self._range,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int32,
        )
        codes = ao.quantize_affine(rows, (1, dim), scale, zero, *self._range)
        if self._bits == _NIBBLES:
            high, low = codes.chunk(2, dim=-1)
            codes = high << 4 | low
        apart = x.shape[:-1]
        return codes.view(*apart, -1), scale.view(*apart, 1), zero.view(*apart, 1)

    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scale, zero = stored
        if self._bits == _NIBBLES:
            codes = torch.cat((codes >> 4, codes & 15), dim=-1)
        dim = codes.shape[-1]
        made = self._library.dequantize_affine(
            codes.reshape(-1, dim),
            (1, dim),
            scale.reshape(-1),
            zero.reshape(-1),
            *self._range,
            output_dtype=self.place.dtype,
        )
        return made.view(codes.shape)


class BitsAndBytes(_Foreign):
    """Codes of bitsandbytes' dynamic 8 bits or nf4, with a largest number per block (bnb-*)."""

    library = "bitsandbytes"
    module = "bitsandbytes.functional"

    def _check(self, dim: int) -> None:
        if dim % _BNB_BLOCK:
            raise ConfigError(
                f"heads of {dim} numbers: bitsandbytes' blocks take a multiple of {_BNB_BLOCK}"
            )
        # The largest power of two dividing a head, so no block spans two rows.
        self._block = min(dim & -dim, _BNB_LARGEST)
        self._map: torch.Tensor = self._library.create_dynamic_map()

    def _extra(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        return ((dim // self._block, torch.float32),)

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bnb, flat = self._library, x.contiguous()
        if self._bits == _NIBBLES:
            codes, state = bnb.quantize_4bit(flat, blocksize=self._block, quant_type="nf4")
        else:
            code = self._map.to(x.device)
            codes, state = bnb.quantize_blockwise(flat, code=code, blocksize=self._block)
        apart = x.shape[:-1]
        return codes.view(*apart, -1), state.absmax.float().view(*apart, -1)

    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, largest = (each.contiguous() for each in stored)
        bnb, dim = self._library, codes.shape[-1] * 8 // self._bits
        shape = torch.Size((*codes.shape[:-1], dim))
        state = bnb.QuantState(
            absmax=largest.view(-1),
            shape=shape,
            blocksize=self._block,
            dtype=self.place.dtype,
            quant_type="nf4" if self._bits == _NIBBLES else None,
            code=bnb.get_4bit_type("nf4", device=codes.device)
            if self._bits == _NIBBLES
            else self._map.to(codes.device),
        )
        if self._bits == _NIBBLES:
            return bnb.dequantize_4bit(codes.view(-1, 1), state).view(shape)
        return bnb.dequantize_blockwise(codes, state).view(shape)
