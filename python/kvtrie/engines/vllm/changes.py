"""Changes of blocks below the GPU, and vLLM's names of blocks, as events publish them.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

__all__ = ["Change", "Extra", "Naming"]


class Extra(NamedTuple):
    """The facts in a block's hash other than its tokens.

    Attributes:
        lora_id: vLLM's number of the adapter.
        lora_name: its name.
        keys: salt, adapter and images of each of its hashes, as vLLM's events have them; empty if
            none has any.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    keys: tuple[tuple[Any, ...] | None, ...] = ()


class Naming(Protocol):
    """vLLM's names of blocks."""

    def hash(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Return the hashes of a block of tokens alone, one after the other."""
        ...

    def facts(self, request: Request, start: int, end: int) -> Extra:
        """Return the facts of a request's block other than its tokens."""
        ...


class Change(NamedTuple):
    """A block that came whole to a tier, or that is whole there no more.

    Attributes:
        stored: whether it came.
        tier: index of the tier.
        group: index of the group of layers.
        hash: vLLM's hashes of it, one after the other.
        parent: those of the block before it; None for a first one.
        tokens: its tokens.
        extra: the facts in its hash other than its tokens.
    """

    stored: bool
    tier: int
    group: int
    hash: bytes
    parent: bytes | None
    tokens: list[int]
    extra: Extra
