"""Values: reads and writes blocks with their headers and checksums in a store.

Invariant: a block is `ok` only if its header, label and every requested layer were verified.
Cost: a hash of the bytes, without the interpreter lock.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
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
    headers = np.empty((len(blocks), form.header_bytes), np.uint8)
    memories = [memory.numpy() for _, _, _, memory in blocks]
    proofs: dict[int, str | None] = {}

    def verify(*numbers: int) -> None:
        read = [(blocks[at][0], headers[at], blocks[at][2], memories[at]) for at in numbers]
        proofs.update(zip(numbers, form.verify(read), strict=True))

    rows = [
        Get(name, block[2], headers[at], memories[at], partial(verify, at))
        for at, (name, block) in enumerate(zip(names, blocks, strict=True))
    ]
    found = store.get_many(rows, deadline)
    read = [at for at, result in enumerate(found) if result.outcome == "ok"]
    verify(*(at for at in read if at not in proofs))
    for at in read:
        why = proofs[at]
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
