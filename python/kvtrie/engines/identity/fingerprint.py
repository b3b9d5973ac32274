"""Fingerprint: the name of a model's computation, to keep KV of different models apart.

It covers every parameter and buffer, and a description of everything else: the configuration, the
attributes of each module, its classes and functions, and the versions of their packages. Fields in
`model_fields` are excluded, each with a reason. It is computed once per model object and again
after a change (see `ModelState`).
Invariant: a cache accepts KV of a single fingerprint.
Cost: a pass over all weights, 0.9 processor seconds for 135M parameters in float32, on up to eight
threads. Later calls check each module, in some microseconds per module.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.identity.code import Description, version_of
from kvtrie.engines.identity.model_fields import excluded, follows_length
from kvtrie.engines.identity.model_state import ModelState, own_tensors, python_modules
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from kvtrie import BlockManager

__all__ = ["fingerprint", "require_same"]

# By model: its state, the digest of its tensors, and its name.
_NAMES: WeakKeyDictionary[torch.nn.Module, tuple[ModelState, bytes, str]] = WeakKeyDictionary()
_BOUND: WeakKeyDictionary[BlockManager, str] = WeakKeyDictionary()
_LOCK = threading.Lock()
_PACKAGES = ("torch", "transformers")


def fingerprint(model: PreTrainedModel) -> str:
    """Return the name of a model's computation of KV, for `ModelShape(fingerprint=...)`.

    A saved and reloaded model has the same name on any device, with the same versions of torch,
    transformers and all packages of its code. A difference in a weight, number, function or setting
    changes the name. It is computed once per model object, and again after a change.

    Detected changes are: changes of a tensor counted by torch (optimizers, `load_state_dict`,
    writes in place), a newly set attribute of a module or configuration, and a replaced function,
    also in a class or in a Python module. Writes through `Tensor.data` or through memory shared
    with NumPy are not detected: call `torch.autograd.graph.increment_version` after them. Torch
    counts no changes of tensors created under `torch.inference_mode`, so these are read on every
    call.

    Args:
        model: a transformers model, with or without adapters in it.

    Returns:
        The model's type and 64 hexadecimal digits.

    Raises:
        ConfigError: an unreadable tensor, for example on the meta device, or a value without a
            canonical encoding: in an attribute, or in the closure or the globals of a function
            outside installed packages.
    """
    return _named(model, ModelState.of(model))


def _named(model: PreTrainedModel, state: ModelState) -> str:
    """Return the name of a model with a given state."""
    with _LOCK:
        cached = _NAMES.get(model)
    if cached is not None and cached[0].same(state):
        return cached[2]
    known = cached[1] if cached is not None and cached[0].same_tensors(state) else None
    tensors = _tensors(model) if known is None else known
    name = _name(model, state, tensors)
    with _LOCK:
        _NAMES[model] = state, tensors, name
    return name


def require_same(
    manager: BlockManager, model: PreTrainedModel, state: ModelState | None = None
) -> None:
    """Refuse a model with a fingerprint different from the manager's.

    A manager without a fingerprint in its `ModelShape` is bound to the first model of a call.

    Args:
        manager: the manager.
        model: the model.
        state: its current state, if the caller already has it.

    Raises:
        ConfigError: a different model, or a changed model.
    """
    mine = _named(model, state or ModelState.of(model))
    with _LOCK:
        theirs = manager.model.fingerprint or _BOUND.setdefault(manager, mine)
    if mine != theirs:
        raise ConfigError(
            f"the manager keeps KV of {theirs!r}, and fingerprint(model) is {mine!r}: other "
            "weights, adapters or RoPE settings, other attributes or functions of modules make "
            "other KV; use a separate manager"
        )


def _tensors(model: torch.nn.Module) -> bytes:
    """Return the digest of the tensors of a model, with their names."""
    tensors = {
        f"{path}.{name}": tensor
        for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())
        for name, tensor in own_tensors(vars(module))
    }
    # hashlib releases the GIL. A few threads reach the speed of memory.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest, tensors, tensors.values()))
    digest = hashlib.blake2b(digest_size=32)
    for name, one in sorted(zip(tensors, digests, strict=True)):
        digest.update(f"{len(name)} {name} ".encode() + one)
    return digest.digest()


def _name(model: torch.nn.Module, state: ModelState, tensors: bytes) -> str:
    """Compute the name of a model with these tensors."""
    modules = dict(cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()))
    describe = Description({id(module): path for path, module in modules.items()})
    parts: dict[str, object] = {"tensors": tensors}
    for path, module in modules.items():
        own = vars(module)
        rope = own.get("rope_type")
        parts[f"module {path}"] = describe.of(type(module))
        for name, value in own.items():
            if not excluded(module, name) and not follows_length(rope, name):
                parts[f"{path}.{name}".lstrip(".")] = describe.of(value)
    parts["code"] = describe.kinds(state.kinds, python_modules(state.kinds))
    packages = sorted({*_PACKAGES, *describe.packages} - {"kvtrie"})
    parts["packages"] = {package: version_of(package) for package in packages}
    digest = Encoding().digest(parts, type(model).__name__)
    return f"{type(model).__name__} {digest}"


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    try:
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        numbers = flat.cpu().numpy().data
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"tensor {name} ({tensor.dtype} on {tensor.device}) cannot be read for a fingerprint: "
            f"{error}"
        ) from error
    about = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    digest = hashlib.blake2b(about, digest_size=32)
    digest.update(numbers)
    return digest.digest()
