"""Fingerprint: the name of all by which a model computes, so that KV of two models never matches.

It digests every parameter and buffer, and a description of everything else: the configuration, the
attributes of each module, the classes and functions that compute, and the versions of the packages
that they are from; without what `model_fields` lists with reasons. It is computed once per model
object and again when something in it has changed; see `ModelState`.
Invariant: a cache takes KV of one fingerprint only.
Cost: one pass over all weights, 0.9 processor seconds for 135M parameters in float32, shared by up
to eight threads; afterwards a look at each module, some microseconds, per call.
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

# Of each model its state, the digest of its tensors, and its name.
_NAMES: WeakKeyDictionary[torch.nn.Module, tuple[ModelState, bytes, str]] = WeakKeyDictionary()
_BOUND: WeakKeyDictionary[BlockManager, str] = WeakKeyDictionary()
_LOCK = threading.Lock()
_PACKAGES = ("torch", "transformers")


def fingerprint(model: PreTrainedModel) -> str:
    """The name of all by which a model computes KV: `ModelShape(fingerprint=...)`.

    Equal for a model that was saved and loaded again, on whatever device, as long as torch,
    transformers and what else its code is from have the same versions. Another one in one weight,
    number, function or setting has another name. It is computed once per model object, and again
    after a change. Seen is whatever torch counts as a change of a tensor (optimizers,
    `load_state_dict`, writing in place), any attribute of a module or configuration that was set,
    and any function, also of a class or of the Python module that it is in, that was replaced.
    Writing through `Tensor.data` or memory shared with NumPy leaves no trace: call
    `torch.autograd.graph.increment_version` after it. Of tensors made under `torch.inference_mode`
    torch counts no changes, so they are read on every call.

    Args:
        model: a transformers model, with or without adapters in it.

    Returns:
        The model's type and 64 hexadecimal digits.

    Raises:
        ConfigError: a tensor whose bytes cannot be read, one on the meta device say, or a value
            without a canonical encoding: in an attribute, in the closure of a function that is in
            no installed package, or in a global that such a function reads.
    """
    return _named(model, ModelState.of(model))


def _named(model: PreTrainedModel, state: ModelState) -> str:
    """The name of a model that is in a state."""
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
    """Refuse a model other than the one whose KV a manager keeps, as `fingerprint` names it.

    A manager whose `ModelShape` has no fingerprint is bound to the first model that asks.

    Args:
        manager: the manager.
        model: the model.
        state: its state, if the caller has just looked at it.

    Raises:
        ConfigError: it is another model, or this one has changed since.
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
    """Digest the tensors of a model, with their names."""
    tensors = {
        f"{path}.{name}": tensor
        for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())
        for name, tensor in own_tensors(vars(module))
    }
    # hashlib lets other threads run; a few of them are as fast as memory.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest, tensors, tensors.values()))
    digest = hashlib.blake2b(digest_size=32)
    for name, one in sorted(zip(tensors, digests, strict=True)):
        digest.update(f"{len(name)} {name} ".encode() + one)
    return digest.digest()


def _name(model: torch.nn.Module, state: ModelState, tensors: bytes) -> str:
    """The name of a model with these tensors."""
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
