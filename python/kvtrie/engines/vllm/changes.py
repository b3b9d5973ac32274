"""Changes of blocks below the GPU and vLLM's names of blocks, for KV events.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

__all__ = ["Change", "Extra", "Naming"]


class Extra(NamedTuple):
    """The facts in a block's hash in addition to its tokens.

    Attributes:
        lora_id: vLLM's number of the adapter.
        lora_name: its name.
        keys: salt, adapter and images of each of its hashes, in the form of vLLM's events. Empty
            if no hash has any.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    keys: tuple[tuple[Any, ...] | None, ...] = ()


class Naming(Protocol):
    """vLLM's names of blocks."""

    def hash(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Return the concatenated hashes of a block of plain tokens."""
        ...

    def facts(self, request: Request, start: int, end: int) -> Extra:
        """Return the facts of a request's block in addition to its tokens."""
        ...


class Change(NamedTuple):
    """A block newly complete on a tier, or no longer complete there.

    Attributes:
        stored: whether it is newly complete.
        tier: index of the tier.
        group: index of the group of layers.
        hash: vLLM's hashes of it, concatenated.
        parent: the hashes of the block before it, or None for a first block.
        tokens: its tokens.
        extra: the facts in its hash in addition to its tokens.
    """

    stored: bool
    tier: int
    group: int
    hash: bytes
    parent: bytes | None
    tokens: list[int]
    extra: Extra
