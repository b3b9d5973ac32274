"""Layout: arrangement of the KV of a layer of a block in memory.

A layout describes bytes, not values: two pools (or a pool and a file) may exchange raw bytes
exactly when their layouts have the same digest.
Invariant: equal layouts have equal digests on every machine and in every version. The digest covers
every field.
Cost: arithmetic on a few integers. KV memory is not accessed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, flag, put, text, whole, word

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPE_BYTES", "FORMATS", "INT4_GROUP", "Axis", "Layout", "PackedPart"]

Axis: TypeAlias = Literal["block", "layer", "kv", "token", "head", "dim"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of a number, by torch's name of the dtype."""

INT4_GROUP = 32
"""Number of int4 values sharing a scale: tokens of a K channel, channels of a V token."""

_SCALE_BYTES = 4
_INT4_SCALE_BYTES = 2
_VECTOR_BYTES = 16
_AXES: tuple[Axis, ...] = ("block", "layer", "kv", "token", "head", "dim")


class PackedPart(NamedTuple):
    """The place of int4's K or V in a layer of a block.

    Attributes:
        plane: the index of its plane.
        codes_at: byte offset of its codes in the plane.
        scales_at: byte offset of its scales in the plane.
    """

    plane: int
    codes_at: int
    scales_at: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Order and meaning of the bytes of a pool.

    Attributes:
        order: the six axes, outermost first. The default is kvtrie's: inside a block the KV is
            ordered by layer, so a layer of a block is a contiguous range.
        strides: bytes from an index to the next along each axis of `order`. None means dense,
            except for the padding of `alignment`.
        dtype: torch's name of the stored numbers' type, or "int4", with two numbers per byte and
            scales by "channel".
        kv: "joined" keeps K and V of a layer together in a tensor, "split" in two tensors.
        scales: the numbers covered by an fp32 quantisation scale, or "none" for plain numbers.
            Scales of a "token" (all its heads) or "group" (a head of a token), of K and then of V,
            follow the numbers of each layer of each block. Scales of a "head" or of the whole
            "tensor" are stored elsewhere. Scales by "channel" are fp16 numbers after the numbers:
            for K a scale and a minimum per 32 tokens of a channel, for V a scale per 32 channels of
            a token.
        latent: True if a compressed vector per token replaces both K and V.
        alignment: every layer of a block starts at a multiple of this many bytes.
        rope: "rotated" if stored keys include their position's rotation, "plain" if they are stored
            before rotation, "none" for models without rotary positions.
        opaque: an engine's name of the layout of a layer of a block, if only the engine knows it:
            the bytes are copied unchanged, never converted or read. Empty if the other fields
            describe the layout.

    Raises:
        ConfigError: an unknown axis, dtype or word, or an invalid number.
    """

    order: tuple[Axis, ...] = _AXES
    strides: tuple[int, ...] | None = None
    dtype: str = "float32"
    kv: Literal["joined", "split"] = "joined"
    scales: Literal["none", "tensor", "head", "token", "group", "channel"] = "none"
    latent: bool = False
    alignment: int = 1
    rope: Literal["rotated", "plain", "none"] = "rotated"
    opaque: str = ""

    def __post_init__(self) -> None:
        axes = few("order", self.order, len(_AXES))
        if sorted(word("an axis of order", axis, _AXES) for axis in axes) != sorted(_AXES):
            raise ConfigError(f"order must name each of {_AXES} once, not {axes}")
        word("dtype", self.dtype, (*DTYPE_BYTES, "int4"))
        word("kv", self.kv, ("joined", "split"))
        word("scales", self.scales, ("none", "tensor", "head", "token", "group", "channel"))
        word("rope", self.rope, ("rotated", "plain", "none"))
        text("opaque", self.opaque)
        put(
            self,
            order=axes,
            latent=flag("latent", self.latent),
            alignment=whole("alignment", self.alignment, 1, 2**30),
        )
        if self.strides is not None:
            strides = few("strides", self.strides, len(axes))
            if len(strides) != len(axes):
                raise ConfigError(f"{len(strides)} strides given for {len(axes)} axes")
            put(self, strides=tuple(whole("a stride", step, 0, 2**63 - 1) for step in strides))
        if self.packed != (self.scales == "channel"):
            raise ConfigError(
                f"dtype is {self.dtype!r} and scales are by {self.scales!r}: int4 and scales by "
                "channel go together"
            )
        if self.packed and (self.latent or self.strides is not None or axes != _AXES):
            raise ConfigError(
                f"int4 is for K and V in the order {_AXES} without strides: latent is "
                f"{self.latent}, the order {axes}, strides are {self.strides}"
            )

    @property
    def packed(self) -> bool:
        """Whether the numbers are int4, read and written only as whole blocks."""
        return self.dtype == "int4"

    def planes(
        self, block_tokens: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None
    ) -> tuple[int, ...]:
        """Return the bytes of a layer of a block in each of the layout's tensors.

        Padding keeps rows whole: a plane is a multiple of both `alignment` and a token's row, so
        tokens of all layers and blocks are evenly spaced and one index reaches any of them. With
        scales after the numbers it is a multiple of 16 bytes instead of a row.

        Args:
            block_tokens: tokens per block.
            kv_heads: heads of K and of V.
            head_dim: numbers per head of K.
            v_head_dim: numbers per head of V, if different from K's.

        Returns:
            A number for joined or latent layouts, two numbers (K, V) for split layouts.

        Raises:
            ConfigError: K and V have different widths in a joined layout.
        """
        block_tokens, kv_heads, head_dim, v_head_dim = _numbers(
            block_tokens, kv_heads, head_dim, v_head_dim
        )
        width = DTYPE_BYTES.get(self.dtype, 0) * kv_heads
        key_row, value_row = width * head_dim, width * v_head_dim
        if self.packed:
            return self._packed(block_tokens, kv_heads, head_dim, v_head_dim)[1]
        found = block_tokens * {"token": 1, "group": kv_heads}.get(self.scales, 0)
        if self.latent:
            return (self._padded(block_tokens * key_row, key_row, found),)
        if self.kv == "split":
            return (
                self._padded(block_tokens * key_row, key_row, found),
                self._padded(block_tokens * value_row, value_row, found),
            )
        self._require_same_width(head_dim, v_head_dim)
        return (self._padded(2 * block_tokens * key_row, key_row, 2 * found),)

    def packed_parts(
        self, block_tokens: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None
    ) -> tuple[PackedPart, PackedPart]:
        """Return the places of K and V in a layer of an int4 block, with arguments as for `planes`.

        Raises:
            ConfigError: the dtype is not int4, or K and V have different widths in a joined layout.
        """
        numbers = _numbers(block_tokens, kv_heads, head_dim, v_head_dim)
        if not self.packed:
            raise ConfigError(f"dtype is {self.dtype!r}: only blocks in int4 have packed parts")
        return self._packed(*numbers)[0]

    def _packed(
        self, block_tokens: int, heads: int, head_dim: int, v_head_dim: int
    ) -> tuple[tuple[PackedPart, PackedPart], tuple[int, ...]]:
        """Return the places of K and V in int4, and the bytes of each plane."""
        self._require_same_width(head_dim, v_head_dim)
        keys = block_tokens * heads * head_dim // 2
        values = block_tokens * heads * v_head_dim // 2
        key_scales = 2 * _INT4_SCALE_BYTES * -(-block_tokens // INT4_GROUP) * heads * head_dim
        value_scales = _INT4_SCALE_BYTES * block_tokens * heads * -(-v_head_dim // INT4_GROUP)
        step = math.lcm(self.alignment, _VECTOR_BYTES)
        if self.kv == "joined":
            at = _up(keys + values, _VECTOR_BYTES)
            parts = PackedPart(0, 0, at), PackedPart(0, keys, at + key_scales)
            return parts, (_up(at + key_scales + value_scales, step),)
        places = _up(keys, _VECTOR_BYTES), _up(values, _VECTOR_BYTES)
        sizes = _up(places[0] + key_scales, step), _up(places[1] + value_scales, step)
        return (PackedPart(0, 0, places[0]), PackedPart(1, 0, places[1])), sizes

    @staticmethod
    def scales_at(numbers: int) -> int:
        """Return the offset of the scales after `numbers` bytes of numbers."""
        return -(-numbers // _SCALE_BYTES) * _SCALE_BYTES

    def digest(self) -> bytes:
        """Return a 32-byte name of this layout, equal exactly for equal layouts."""
        # A third of the time of `import kvtrie` otherwise, with OpenSSL.
        import hashlib
        import json

        fields_of = asdict(self)
        if not self.opaque:  # keep the digests of versions without opaque layouts
            del fields_of["opaque"]
        fields = json.dumps(fields_of, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(fields.encode(), digest_size=32, person=b"kvtrie-layout").digest()

    def _require_same_width(self, head_dim: int, v_head_dim: int) -> None:
        if self.kv == "joined" and head_dim != v_head_dim:
            raise ConfigError(
                f"K has {head_dim} numbers per head and V {v_head_dim}: use Layout(kv='split')"
            )

    def _padded(self, size: int, row: int, scales: int) -> int:
        if scales:
            size, row = self.scales_at(size) + _SCALE_BYTES * scales, _VECTOR_BYTES
        step = math.lcm(self.alignment, row) if self.alignment > 1 else row
        return -(-size // step) * step


def _numbers(
    block_tokens: int, kv_heads: int, head_dim: int, v_head_dim: int | None
) -> tuple[int, int, int, int]:
    """Validate the numbers of a block. V is as wide as K unless a width is given."""
    head_dim = whole("head_dim", head_dim, 1, 2**31 - 1)
    return (
        whole("block_tokens", block_tokens, 1, 2**63 - 1),
        whole("kv_heads", kv_heads, 1, 2**31 - 1),
        head_dim,
        head_dim if v_head_dim is None else whole("v_head_dim", v_head_dim, 1, 2**31 - 1),
    )


def _up(size: int, step: int) -> int:
    """Return `size` rounded up to a multiple of a step."""
    return -(-size // step) * step


FORMATS: Mapping[str, Layout | None] = {
    "native": None,
    "int8": Layout(dtype="int8", scales="group"),
    "fp8": Layout(dtype="float8_e4m3fn", scales="group"),
    "int4": Layout(dtype="int4", scales="channel"),
}
"""Formats of lower tiers by name. None is the model's own."""
