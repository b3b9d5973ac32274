"""Fingerprint: the name of a model's weights, so that KV of two models never matches.

It digests every parameter and buffer, the configuration (RoPE settings are part of it), and which
adapters are active or merged. It is computed once per model object and again when something in it
has changed: an object replaced, or a tensor written in place, as `Tensor._version` shows.
Invariant: a cache takes KV of one fingerprint only.
Cost: one pass over all weights, 0.9 processor seconds for 135M parameters in float32, shared by up
to eight threads; afterwards a look at each tensor and module, a microsecond each, per call.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvtrie import BlockManager

__all__ = ["fingerprint", "require_same"]

# Keys of a configuration that name its file or choose the model's outputs.
_SILENT = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class _State(NamedTuple):
    """The state of a model that its fingerprint covers; equal states have one.

    A reference to a tensor is named by its number, which stays its own as long as it is kept.
    """

    numbers: list[object]
    adapters: list[str]
    config: dict[str, Any]
    refs: list[ref[torch.Tensor]]

    def same(self, other: _State) -> bool:
        """Whether nothing has changed between the two."""
        return self[:3] == other[:3]


_NAMES: WeakKeyDictionary[torch.nn.Module, tuple[_State, str]] = WeakKeyDictionary()
_BOUND: WeakKeyDictionary[BlockManager, str] = WeakKeyDictionary()
_LOCK = threading.Lock()


def fingerprint(model: PreTrainedModel) -> str:
    """The name of a model's weights, RoPE settings and adapters: `ModelShape(fingerprint=...)`.

    Equal for a model that was saved and loaded again, on whatever device. Another one in one weight
    has another name. It is computed once per model object, and again after a change. Seen is
    whatever torch counts as a change of a tensor (optimizers, `load_state_dict`, writing in place),
    and any tensor or adapter that was replaced. Writing through `Tensor.data` or memory shared with
    NumPy leaves no trace: call `torch.autograd.graph.increment_version` after it. Of tensors made
    under `torch.inference_mode` torch counts no changes, so they are read on every call.

    Args:
        model: a transformers model, with or without adapters in it.

    Returns:
        The model's type and 64 hexadecimal digits.

    Raises:
        ConfigError: a tensor whose bytes cannot be read, one on the meta device say.
    """
    state = _state(model)
    with _LOCK:
        cached = _NAMES.get(model)
    if cached is not None and cached[0].same(state):
        return cached[1]
    name = _name(model, state)
    with _LOCK:
        _NAMES[model] = state, name
    return name


def require_same(manager: BlockManager, model: PreTrainedModel) -> None:
    """Refuse a model other than the one whose KV a manager keeps.

    A manager whose `ModelShape` has no fingerprint is bound to the first model that asks.

    Raises:
        ConfigError: it is another model, or this one has changed since.
    """
    mine = fingerprint(model)
    with _LOCK:
        theirs = manager.model.fingerprint or _BOUND.setdefault(manager, mine)
    if mine != theirs:
        raise ConfigError(
            f"the manager keeps KV of {theirs!r}, and fingerprint(model) is {mine!r}: other "
            "weights, adapters or RoPE settings make other KV; use a separate manager"
        )


def _state(model: torch.nn.Module) -> _State:
    """One walk over all modules; `named_parameters` alone would take four times as long."""
    config = getattr(model, "config", None)
    numbers: list[object] = []
    adapters: list[str] = []
    refs: list[ref[torch.Tensor]] = []
    left = [model]
    while left:
        own = vars(left.pop())
        left += [one for one in own["_modules"].values() if one is not None]
        tensors = own["_parameters"].values()
        if own["_buffers"]:
            tensors = [tensor for _, tensor in _tensors(own)]
        for tensor in tensors:
            if tensor is None:
                continue
            weak = ref(tensor)
            refs.append(weak)
            # Inference tensors have no version: use an object that is equal to no other.
            version = object() if tensor.is_inference() else tensor._version  # noqa: SLF001
            numbers += (id(weak), version, tensor.data_ptr())
        if "merged_adapters" in own:
            adapters.append(repr([own.get(name) for name in _ADAPTERS]))
    return _State(numbers, adapters, {} if config is None else config.to_dict(), refs)


def _tensors(own: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module itself, given its attributes."""
    rope = str(own.get("rope_type"))
    # These follow the length of what the model last saw; what they start from is a buffer too.
    moves = "dynamic" in rope or "longrope" in rope
    for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
        follows = moves and name.endswith("inv_freq") and "original" not in name
        if tensor is not None and not follows:
            yield name, tensor


def _name(model: torch.nn.Module, state: _State) -> str:
    tensors = {
        f"{path}.{name}": tensor
        for path, module in cast("Any", model).named_modules()
        for name, tensor in _tensors(module.__dict__)
    }
    # hashlib lets other threads run; a few of them are as fast as memory.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest, tensors, tensors.values()))
    settings = {name: one for name, one in state.config.items() if name not in _SILENT}
    about = json.dumps(
        [type(model).__name__, settings, state.adapters], sort_keys=True, default=str
    )
    digest = hashlib.blake2b(about.encode(), digest_size=32)
    for name, one in sorted(zip(tensors, digests, strict=True)):
        digest.update(f"{len(name)} {name} ".encode() + one)
    return f"{type(model).__name__} {digest.hexdigest()}"


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
