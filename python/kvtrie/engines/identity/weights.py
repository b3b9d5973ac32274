"""Digest of the weights of a process: every bit of every parameter and buffer.

vLLM and SGLang give their weights no name, so the digest is computed from the tensors after
loading. It covers sharding, quantisation and scales, but no paths. On a CPU it is BLAKE2b on
several threads. On a device a row of 2^20 words becomes two sums modulo 2^64 of each word times an
odd number drawn for its place, and the sums are hashed with BLAKE2b on the host. An odd factor has
an inverse modulo 2^64, so a change of a single word in a row always changes both sums. A change of
several words keeps both sums with a probability of 2^-64 (if only top bits have changed) down to
2^-128.
Invariant: equal tensors on the same kind of device have equal digests in every process.
Cost: a pass over all weights. On a CPU about 1.1 processor seconds per GB. On a device 60 bytes of
its memory are moved per word and 300 MB are in use (both computed, not yet measured).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "checkpoint_digest",
    "checkpoint_folder",
    "digest",
    "files_digest",
    "owners",
    "packed_away",
    "tensors_of",
]

_CHUNK = 1 << 25  # bytes hashed by a thread at a time
_ROW = 1 << 20  # words of a row on a device
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ROWS = 16  # rows multiplied at a time


def tensors_of(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer of models with its name, in a fixed order.

    Composite tensors (for example quantised numbers with scales) are split into their parts.
    """
    for at, model in enumerate(models):
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in sorted(named, key=lambda each: each[0]):
            yield from _parts(f"{at}.{name}", tensor)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    inner = getattr(tensor, "partitions", None)
    if isinstance(inner, dict):
        for at, part in cast("dict[Any, torch.Tensor]", inner).items():
            yield from _parts(f"{name}.{at}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Return a 32-byte digest of all bits, names, types and shapes of the tensors.

    Raises:
        ConfigError: an unreadable tensor, for example on the meta device.
    """
    whole = hashlib.blake2b(digest_size=32)
    sums: list[torch.Tensor] = []
    chunks: list[memoryview] = []
    with torch.no_grad():
        for name, tensor in named:
            flat, strides = _flat(name, tensor)
            about = [name, str(tensor.dtype), tuple(tensor.shape), strides, tensor.device.type]
            whole.update(json.dumps(about).encode() + b"\n")
            if flat.device.type == "cpu":
                data = flat.numpy().data
                chunks += [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
            elif len(flat):
                sums += _row_sums(flat)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            for one in threads.map(_blake, chunks):
                whole.update(one)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for each in sums:
            by_device.setdefault(each.device, []).append(each)
        for rows in by_device.values():
            whole.update(torch.cat(rows).cpu().numpy().tobytes())
    return whole.digest()


def _blake(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _flat(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the bytes of a tensor in memory order, and its strides if they are unusual."""
    try:
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
        dense = tensor.detach().permute(order)
        unusual = () if tensor.is_contiguous() or not dense.is_contiguous() else strides
        dense = dense if unusual else tensor.detach()
        # Numbers on a separate axis can be viewed as bytes, whatever their type.
        flat = dense.contiguous().reshape(-1, 1).view(torch.uint8).reshape(-1)
        flat[:1].cpu()  # a tensor without memory raises here
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"tensor {name} ({tensor.dtype} on {tensor.device}) cannot be read for a digest of "
            f"the weights: {error}"
        ) from error
    return flat, unusual


def _row_sums(flat: torch.Tensor, row: int = _ROW) -> list[torch.Tensor]:
    """Return two sums modulo 2^64 per row of a tensor's bytes, on its device."""
    factors = _factors(flat.device)
    sums: list[torch.Tensor] = []
    step = _ROWS * row * 4
    for at in range(0, len(flat), step):
        piece = flat[at : at + step]
        if len(piece) % 4 or piece.data_ptr() % 4:
            piece = torch.nn.functional.pad(piece, (0, -len(piece) % 4)).clone()
        words = piece.view(torch.int32).to(torch.int64)
        full = len(words) // row * row
        for rows in (words[:full].view(-1, row), words[full:].view(1, -1)):
            if rows.numel():
                width = rows.shape[1]
                sums += [(rows * factor[:width]).sum(1) for factor in factors]
    return sums


_FACTORS: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return odd numbers by place, equal in every process: SplitMix64 of the place, two lanes."""
    if device not in _FACTORS:
        lanes: list[torch.Tensor] = []
        for lane in (1, 2):
            words = torch.arange(lane << 40, (lane << 40) + _ROW, dtype=torch.int64)
            for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
                high = (words >> shift) & ((1 << (64 - shift)) - 1)
                words = (words ^ high) * factor
            lanes.append((words | 1).to(device))
        _FACTORS[device] = lanes[0], lanes[1]
    return _FACTORS[device]


def files_digest(paths: Iterable[Path]) -> bytes:
    """Return a 32-byte digest of the contents and names of files, without their folders.

    Raises:
        OSError: a file cannot be read.
    """
    whole = hashlib.blake2b(digest_size=32)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for path in paths:
            size = path.stat().st_size
            pieces = threads.map(partial(_piece, path), range(0, size, _CHUNK))
            whole.update(f"{path.name} {size}\n".encode() + b"".join(pieces))
    return whole.digest()


def checkpoint_digest(model: str, revision: str | None, cache: str | None) -> bytes | None:
    """Return `files_digest` of a model's weight files, or None if they are not on this machine.

    Args:
        model: a folder, a file, or the name of a downloaded model of the hub.
        revision: the revision of the hub's model.
        cache: the folder of downloaded models, or None for the default.

    Raises:
        OSError: a file cannot be read.
    """
    folder = checkpoint_folder(model, revision, cache)
    if folder is None:
        return None
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    files = [file for file in files if file.is_file() and file.suffix in _WEIGHTS]
    return files_digest(files) if files else None


def checkpoint_folder(model: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the folder or file of a model on this machine, or None.

    Takes the arguments of `checkpoint_digest`.
    """
    folder = Path(model)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType] - its own

    try:
        found = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(found)


def _piece(path: Path, at: int) -> bytes:
    with path.open("rb") as opened:
        opened.seek(at)
        return hashlib.blake2b(opened.read(_CHUNK), digest_size=32).digest()


def owners(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the outermost modules of this process containing any of the layers.

    An engine gives a plug-in only the KV layers, not their models. A draft model is a separate
    model. Cost: a walk over all objects of the process, some tenths of a second.
    """
    parents: dict[int, list[torch.nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            inside = cast("dict[str, Any]", vars(each)).get("_modules", {})
            for child in inside.values():
                parents.setdefault(id(child), []).append(each)
    roots: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    left = list(layers)
    while left:
        module = left.pop(0)
        if id(module) not in seen:
            seen.add(id(module))
            above = parents.get(id(module), [])
            left += above
            if not above:
                roots[id(module)] = module
    return sorted(roots.values(), key=lambda root: type(root).__name__)


def packed_away(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether a kernel keeps weights outside the models' parameters.

    These kernels (vLLM's for x86 CPUs, and some 4-bit kernels) leave an empty parameter.
    """
    return any(
        "weight" in name.rpartition(".")[2] and not parameter.numel()
        for model in models
        for name, parameter in model.named_parameters()
    )
