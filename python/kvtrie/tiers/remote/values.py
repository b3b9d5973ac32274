"""Values: reads and writes blocks with their headers and checksums in a store.

Invariant: a block is `ok` only if its header, label and every requested layer were verified.
Cost: a hash of the bytes, without the interpreter lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtrie.tiers.remote.protocol import Get, Put, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import RemoteStore

__all__ = ["ReadBlock", "WrittenBlock", "get_values", "put_values"]

ReadBlock: TypeAlias = tuple[bytes, int, tuple[int, int], torch.Tensor]
WrittenBlock: TypeAlias = tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]


def get_values(
    store: RemoteStore,
    form: ValueFormat,
    names: Sequence[bytes],
    blocks: Sequence[ReadBlock],
    *,
    deadline: int,
) -> list[Result]:
    """Read blocks into their memory. A value failing verification is `damaged`."""
    headers = [torch.empty(form.header_bytes, dtype=torch.uint8).numpy() for _ in blocks]
    rows = [
        Get(name, layers, header, memory.numpy())
        for name, header, (_, _, layers, memory) in zip(names, headers, blocks, strict=True)
    ]
    found = store.get_many(rows, deadline)
    read = [at for at, result in enumerate(found) if result.outcome == "ok"]
    proofs = form.verify(
        [(blocks[at][0], headers[at], blocks[at][2], rows[at].memory) for at in read]
    )
    for at, why in zip(read, proofs, strict=True):
        if why is not None:
            found[at] = Result("damaged", why)
    return found


def put_values(
    store: RemoteStore,
    form: ValueFormat,
    names: Sequence[bytes],
    blocks: Sequence[WrittenBlock],
    *,
    deadline: int,
) -> list[Result]:
    """Write whole blocks under their names, each with its header."""
    rows = [(key, label, memory.numpy()) for key, _, _, memory, label in blocks]
    found = [Result("ok")] * len(blocks)
    puts: list[tuple[int, Put]] = []
    for at, (header, why) in enumerate(form.headers(rows)):
        if why is None:
            puts.append((at, Put(names[at], header, rows[at][2])))
        else:
            found[at] = Result("refused", why)
    if puts:
        results = store.put_many([put for _, put in puts], deadline)
        for (at, _), result in zip(puts, results, strict=True):
            found[at] = result
    return found
