"""NativeFirst: the first blocks of prompts, stored in the engine's format on quantized tiers.

All slots of a quantized tier have the same size. So the manager sees each native block as several
consecutive blocks with the same tokens, its *parts*, and a slot has a part of the block's bytes,
unconverted. Budget, eviction, disk, kept memory and a shared store treat a part as a block.
Positions in the manager's sequence are *stretched*. A slot number of the engine's tier includes
the part: part p of the block in slot s is slot `(p + 1) * slots + s`.
Invariant: a block is found only with all of its parts, and its name has the number of parts and
of native tokens. Cost: arithmetic per request and step, nothing with `tokens=0`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.engines.server.request_hints import FAR, RetainedRange
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS
from kvtrie.settings.hint import Retain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.engines.server.commands import Command
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.hint import Hint
    from kvtrie.settings.scope import Scope

__all__ = ["NativeFirst"]


@dataclass(frozen=True, slots=True)
class NativeFirst:
    """Tokens at the start of a prompt, stored on all tiers in the engine's format.

    Attributes:
        tokens: the number of these tokens, a multiple of `block_tokens`, or 0.
        parts: slots of a tier per native block.
        block_tokens: tokens of a block.
        slots: blocks of the engine's memory.
    """

    tokens: int
    parts: int
    block_tokens: int
    slots: int

    @classmethod
    def of(cls, settings: Settings, model: ServedModel) -> NativeFirst:
        """Return the native blocks of a server."""
        size, layout = model.block_tokens, FORMATS[settings.format]
        if not settings.native_first or layout is None:
            return cls(0, 0, size, model.blocks)
        shape = model.shape
        narrow = sum(layout.planes(size, shape.rank_heads, shape.head_dim, shape.v_head_dim))
        parts = -(-shape.layer_bytes(size) // narrow)
        return cls(-(-settings.native_first // size) * size, parts, size, model.blocks)

    def require_room(self, blocks: int) -> None:
        """Check a host tier of `blocks` blocks for room for these tokens and a further block.

        Raises:
            ConfigError: too few blocks.
        """
        taken = self.tokens // self.block_tokens * self.parts
        if taken >= blocks:
            raise ConfigError(
                f"native_first takes {taken} slots of host memory for the first {self.tokens} "
                f"tokens of a prompt, and host memory has {blocks}: at least {taken + 1} wanted"
            )

    def stretch(self, count: int) -> int:
        """Return the length of the manager's sequence for the first tokens of a prompt.

        A native block counts only if it is full.
        """
        if not self.tokens:
            return count
        full = min(count, self.tokens) // self.block_tokens
        return count + full * (self.parts - 1) * self.block_tokens

    def shrink(self, count: int) -> int:
        """Return the tokens of a prompt for a length of the manager's sequence.

        A block without all of its parts does not count.
        """
        if not self.tokens:
            return count
        wide = self.parts * self.block_tokens
        if count >= self.tokens * self.parts:
            return count - self.tokens * (self.parts - 1)
        full, rest = divmod(count, wide)
        return full * self.block_tokens + (rest if rest < self.block_tokens else 0)

    def slots_of(self, slots: list[int], first: int = 0) -> list[int]:
        """Return the manager's slots of blocks in the engine's slots.

        Args:
            slots: the engine's slots.
            first: the index of the first of the blocks in its prompt.
        """
        native = self.tokens // self.block_tokens - first
        if native <= 0:
            return slots
        parts = range(self.slots, (self.parts + 1) * self.slots, self.slots)
        return [slot + part for slot in slots[:native] for part in parts] + slots[native:]

    def sequence(self, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the manager's sequence for the tokens of a prompt."""
        full = min(len(tokens), self.tokens) // self.block_tokens * self.block_tokens
        if not full:
            return tokens
        first = tokens[:full].reshape(-1, self.block_tokens).repeat(self.parts, axis=0)
        return np.concatenate((first.reshape(-1), tokens[full:]))

    def scope(self, scope: Scope) -> Scope:
        """Return the scope of a prompt's blocks, with the number of native tokens and parts."""
        if not self.tokens:
            return scope
        return replace(
            scope,
            lora=f"{scope.lora} native {self.tokens} in {self.parts}",
            extra=tuple((self._place(at), digest) for at, digest in scope.extra),
        )

    def hint(self, hint: Hint) -> Hint:
        """Return a hint with its range converted to the manager's sequence."""
        if not self.tokens or not isinstance(hint, Retain):
            return hint
        end = None if hint.end is None else self._border(hint.end)
        return replace(hint, start=self._border(hint.start), end=end)

    def command(self, command: Command) -> Command:
        """Return an operator's command converted to the manager's sequence."""
        if not self.tokens:
            return command
        ranges = [
            RetainedRange(
                self._border(each.start),
                each.last if each.last == FAR else self._border(each.last),
                each.priority,
                each.ttl_ns,
            )
            for each in command.ranges
        ]
        tokens = None if command.tokens is None else self.sequence(command.tokens)
        return replace(command, tokens=tokens, ranges=tuple(ranges))

    def _border(self, token: int) -> int:
        """Return the end of a range: a block belongs to the range of its first token."""
        return self.stretch(-(-token // self.block_tokens) * self.block_tokens)

    def _place(self, token: int) -> int:
        """Return the position of a token in the manager's sequence, in its block's first part."""
        size = self.block_tokens
        return self.stretch(token // size * size) + token % size
