"""WorkerWeights: the identity of a vLLM worker's computation.

The digest covers every parameter and buffer of the models with KV layers (draft models included),
as loaded and sharded, the state of their modules, the engine's start options, and the KV layout of
its kernels. CPU kernels, and some 4-bit kernels, pack weights into separate memory. Then the files
of the weights are hashed too, in full.
Invariant: after a change of any bit used in the computation, `digest` returns a different value.
Weights repacked while the server runs get a random digest: no older block matches, and newly stored
blocks are not found after a restart.
Cost: see `kvtrie.engines.identity.weights`. Every call is measured and logged.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from kvtrie.engines.identity.module_state import modules_digest
from kvtrie.engines.identity.weights import (
    checkpoint_digest,
    digest,
    owners,
    packed_away,
    tensors_of,
)
from kvtrie.engines.vllm.held_adapters import HeldAdapters
from kvtrie.engines.vllm.layout_check import layouts_digest
from kvtrie.engines.vllm.start_options import options_digest
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig

__all__ = ["WorkerWeights", "combined"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers


class WorkerWeights:
    """The weights, modules, options and layout of a worker.

    Args:
        config: vLLM's configuration.
        tensors: the KV tensors, by vLLM's name of the layer.
        blocks: blocks of each tensor.
        block_tokens: tokens of a block, by vLLM's name of the layer.

    Attributes:
        adapters: the adapters of the models, or None if they take none.

    Raises:
        ConfigError: none of the layers is known to vLLM.
    """

    def __init__(
        self,
        config: VllmConfig,
        tensors: Mapping[str, Any],
        blocks: int,
        block_tokens: Mapping[str, int],
    ) -> None:
        contexts = config.compilation_config.static_forward_context
        modules = [contexts[name] for name in tensors if name in contexts]
        self._models = owners(each for each in modules if isinstance(each, torch.nn.Module))
        if not self._models:
            raise ConfigError(
                "none of the layers that keep KV is in vLLM's static_forward_context: the weights "
                "cannot be digested"
            )
        takes_adapters = config.lora_config is not None
        self.adapters = HeldAdapters(self._models) if takes_adapters else None
        self._config = config
        self._layout = layouts_digest(config, tensors, blocks, block_tokens)
        self._packed: bytes | None = None
        self._objects: dict[tuple[int, str], ref[Any]] = {}

    def digest(self) -> bytes:
        """Return a 32-byte digest of the worker's current computation.

        Raises:
            ConfigError: an option or a tensor cannot be hashed.
        """
        begun, tensors = time.monotonic(), list(tensors_of(self._models))
        hashed = hashlib.blake2b(digest(tensors), digest_size=32)
        for part in (modules_digest(self._models), options_digest(self._config), self._layout):
            hashed.update(part)
        hidden = packed_away(self._models) or any(one.device.type == "cpu" for _, one in tensors)
        if hidden:
            hashed.update(self._packed_digest())
        size = sum(one.numel() * one.element_size() for _, one in tensors)
        _LOG.info(
            "kvtrie: the digest of %d tensors, %.2f GB%s, took %.2f s",
            len(tensors),
            size / 1e9,
            ", and of the files of weights" if hidden else "",
            time.monotonic() - begun,
        )
        return hashed.digest()

    def _packed_digest(self) -> bytes:
        """Return the digest of packed weights: of the files at start, random after a repack."""
        objects = _objects(self._models)
        # New attributes are ignored: compilation adds some.
        same = all(
            at in objects and objects[at]() is one() is not None
            for at, one in self._objects.items()
        )
        if self._packed is None:
            self._packed = _checkpoint(self._config)
        elif not same:
            self._packed = os.urandom(32)
        self._objects = objects
        return self._packed


def _objects(models: list[torch.nn.Module]) -> dict[tuple[int, str], ref[Any]]:
    """Return the kernels and functions in modules: repacking weights replaces them."""
    found: dict[tuple[int, str], ref[Any]] = {}
    modules = [module for model in models for module in model.modules()]
    for at, module in enumerate(modules):
        for name, one in vars(module).items():
            if not name.startswith("_") and not isinstance(one, torch.Tensor | type):
                try:
                    found[at, name] = ref(one)
                except TypeError:  # numbers, strings, lists
                    continue
    return found


def _checkpoint(config: VllmConfig) -> bytes:
    """Return the digest of the files of weights, random if they are not on this machine."""
    model, load = config.model_config, config.load_config
    if "dummy" in str(load.load_format):
        return f"dummy {model.seed}".encode()
    files = checkpoint_digest(model.model, model.revision, load.download_dir)
    if files is None:
        _LOG.warning(
            "kvtrie: a kernel has packed the weights and the files of %s are not on this machine: "
            "KV will not be found after a restart",
            model.model,
        )
    return files or os.urandom(32)


def combined(digests: Iterable[bytes]) -> bytes:
    """Combine the digests of all ranks, in order."""
    return hashlib.blake2b(b"".join(digests), digest_size=32).digest()
