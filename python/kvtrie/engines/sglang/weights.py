"""Weights: the identity of SGLang's weights, and notification of in-place updates.

The digest is computed in the model's process. It covers all parameters and buffers of models with
attention layers, draft models included, the state of their modules, the server's start options, and
the adapter files of `--lora-paths`. Adapters loaded later have random names in SGLang. In-place
updates use methods of SGLang's weight updater, wrapped once per process.
Invariant: all ranks have the same identity. A change of any bit on any rank changes it.
Cost: see `kvtrie.engines.identity.weights`, once at start; measured and logged.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import time
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_lora, get_server_args
from torch import distributed

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.identity.module_state import modules_digest
from kvtrie.engines.identity.weights import (
    checkpoint_digest,
    digest,
    files_digest,
    owners,
    packed_away,
    tensors_of,
)
from kvtrie.engines.sglang.start_options import options_digest
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UPDATES", "Listener", "identity", "watch"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # a name shown by SGLang
_SILENT = ("_name_or_path", "architectures", "transformers_version", "use_cache")
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)


class Listener(Protocol):
    """An object to notify of updates."""

    def weights_updated(self) -> None:
        """Weights were, or may have been, updated in place."""
        ...


_LISTENERS: WeakSet[Listener] = WeakSet()


def identity() -> str:
    """Return the digest of weights, modules and options of all ranks.

    Raises:
        ConfigError: this process has no model, or an option has no canonical encoding.
    """
    gc.collect()  # removes models no longer in use
    layers = [each for each in gc.get_objects() if issubclass(type(each), RadixAttention)]
    models = owners(layers)
    if not models:
        raise ConfigError(
            "no attention layer of SGLang's is in this process: the weights cannot be digested"
        )
    begun, tensors = time.monotonic(), list(tensors_of(models))
    hashed = hashlib.blake2b(digest(tensors), digest_size=32)
    hashed.update(modules_digest(models))
    hashed.update(options_digest(_arguments()))
    if packed_away(models):
        given = get_server_args()
        files = checkpoint_digest(given.model_path, given.revision, given.download_dir)
        hashed.update(files or os.urandom(32))
    for model in models:
        if (config := getattr(model, "config", None)) is not None:
            about = {name: one for name, one in config.to_dict().items() if name not in _SILENT}
            hashed.update(Encoding().encode(about, "config"))
    hashed.update(_adapters())
    digests: list[Any] = [hashed.digest()]
    if distributed.is_initialized():
        group = get_world_group()
        digests = [None] * group.world_size
        distributed.all_gather_object(  # pyright: ignore[reportUnknownMemberType] - untyped
            digests, hashed.digest(), group=group.cpu_group
        )
    size = sum(one.numel() * one.element_size() for _, one in tensors)
    _LOG.info(
        "kvtrie: the digest of %d tensors, %.2f GB, took %.2f s",
        len(tensors),
        size / 1e9,
        time.monotonic() - begun,
    )
    return hashlib.blake2b(b"".join(digests), digest_size=32).hexdigest()


def _arguments() -> object:
    """Return SGLang's `ServerArgs`, None in a process without a server's settings."""
    try:
        return get_server_args()
    except ValueError:
        return None


def _adapters() -> bytes:
    """Return the digest of command-line adapters, random if an adapter is not on this machine."""
    hashed = hashlib.blake2b(digest_size=32)
    for adapter in _paths():
        folder = Path(adapter)
        files = sorted(folder.glob("adapter_*")) if folder.is_dir() else []
        hashed.update(files_digest(files) if files else os.urandom(32))
    return hashed.digest()


def _paths() -> list[str]:
    try:
        adapters = get_lora().lora_paths
    except ValueError:  # no server's settings in this process
        return []
    return [adapter.lora_path for adapter in adapters or ()]


def watch(listener: Listener) -> None:
    """Report updates to an object while it is alive."""
    updater = getattr(import_module(_UPDATER), "SchedulerWeightUpdaterManager")  # noqa: B009 - not in typings
    for name in UPDATES:
        inner = getattr(updater, name)
        if not hasattr(inner, "kvtrie_watches"):
            setattr(updater, name, _watched(inner))
    _LISTENERS.add(listener)


def _watched(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's own
        for listener in list(_LISTENERS):
            listener.weights_updated()
        return inner(*args, **kwargs)

    vars(outer)["kvtrie_watches"] = True
    return outer
