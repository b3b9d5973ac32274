"""Digest of a vLLM object with its tensors: an adapter, or the processed media of a request.

Invariant: equal contents have equal digests in every process on the same kind of device. The class
and the address of an object do not count. Cost: a pass over the bytes of its tensors.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.identity.weights import digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["contents_digest"]

_CODER = Encoding()


def contents_digest(thing: object, without: Collection[str] = ()) -> tuple[bytes, int]:
    """Return a 32-byte digest of all tensors, numbers and texts in an object.

    Args:
        thing: an object. Its attributes, members and entries are followed.
        without: attributes to leave out.

    Returns:
        The digest, and the number of tensors in it.

    Raises:
        ConfigError: a part has no canonical encoding, or a tensor cannot be read.
    """
    whole = hashlib.blake2b(digest_size=32)
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, value in _values("", thing, without):
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        else:
            whole.update(_CODER.encode([name, value], name))
    whole.update(digest(tensors))
    return whole.digest(), len(tensors)


def _values(name: str, thing: Any, without: Collection[str]) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - any part
    """Yield the tensors and plain values of an object, in a fixed order."""
    parts: dict[str, Any]
    if isinstance(thing, dict):
        parts = {str(key): value for key, value in cast("dict[Any, Any]", thing).items()}
    elif isinstance(thing, (list, tuple)):
        parts = {str(at): value for at, value in enumerate(cast("list[Any]", thing))}
    elif hasattr(thing, "__dict__") and not isinstance(thing, (torch.Tensor, type)):
        own = cast("dict[str, Any]", vars(thing))
        parts = {key: value for key, value in own.items() if key not in without}
    else:
        yield name, thing
        return
    yield name, len(parts)
    for key in sorted(parts):
        yield from _values(f"{name}.{key}", parts[key], without)
