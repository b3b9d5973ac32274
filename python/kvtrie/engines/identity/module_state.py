"""Digest of the state of a model's modules outside tensors and configuration.

Layers compute with numbers derived at start: RoPE parameters, epsilons, scales, windows, the kernel
of a quantisation, the isa of an attention kernel. A model outside vLLM's package also has code
without a version. So the digest covers the class of each module, its plain attributes, the
attributes of its attention kernel and quantisation method, the names of its functions, and the
source files of classes outside versioned packages.
Invariant: equal models have equal digests in every process of a rank. Cost: some milliseconds per
hundred modules.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from sysconfig import get_paths
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["modules_digest"]

_PARTS = ("impl", "quant_method")
"""Attributes with objects used in a module's computation."""
_CODER = Encoding()


def modules_digest(models: Iterable[torch.nn.Module]) -> bytes:
    """Return a 32-byte digest of the state of modules."""
    whole = hashlib.blake2b(digest_size=32)
    kinds: set[type] = set()
    for model in models:
        named = cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())
        for path, module in named:
            kinds.add(type(module))
            whole.update(_CODER.encode([path, _state(module)], path))
    for file in sorted({file for kind in kinds if (file := _unversioned(kind)) is not None}):
        whole.update(hashlib.blake2b(file.read_bytes(), digest_size=32).digest())
    return whole.digest()


def _state(thing: object, *, inner: bool = True) -> dict[str, Any]:
    """Return the class of an object, its plain attributes and the names of its functions."""
    state: dict[str, Any] = {"": type(thing)}
    for name, value in vars(thing).items():
        if name in _PARTS and inner and hasattr(value, "__dict__"):
            state[name] = _state(value, inner=False)
        elif isinstance(value, (FunctionType, MethodType, BuiltinFunctionType)):
            state[name] = f"{value.__module__}.{value.__qualname__}"
        elif _is_plain(value):
            state[name] = value
    return state


def _is_plain(value: Any) -> bool:  # noqa: ANN401 - any attribute
    """Return whether a value consists of numbers, text, types and the like, not of tensors."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("list[Any]", value)))
    if isinstance(value, (dict, set, frozenset, torch.Tensor)):
        return False
    try:
        _CODER.encode(value, "")
    except ConfigError:
        return False
    return not hasattr(value, "__dataclass_fields__")


def _unversioned(kind: type) -> Path | None:
    """Return the source file of a class outside installed packages, else None."""
    try:
        file = Path(inspect.getfile(kind)).resolve()
    except (OSError, TypeError):
        return None
    installed = [Path(get_paths()[name]).resolve() for name in ("purelib", "platlib", "stdlib")]
    return None if any(file.is_relative_to(each) for each in installed) else file
