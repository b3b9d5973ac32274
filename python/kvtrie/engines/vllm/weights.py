"""WorkerWeights: the identity of what one worker of vLLM computes with.

It is the digest of every parameter and buffer of the models whose layers keep KV, draft models
included, as they were loaded and sharded; of the state of their modules; of the options that the
engine was started with; and of the layout that its kernels give KV. Kernels for CPUs, and some for
4 bits, pack weights into separate memory: then the files that the weights were loaded from are
digested too, in full.
Invariant: after a change of any bit that the worker computes with, `digest` returns another value.
Weights that were packed again while the server ran get a random one: nothing older matches, and
what is stored from then on is not found after a restart.
Cost: see `kvtrie.engines.identity.weights`; every call is measured and logged.
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

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows


class WorkerWeights:
    """The weights, modules, options and layout of one worker.

    Args:
        config: vLLM's.
        tensors: the tensors of the layers that keep KV, by vLLM's name of the layer.
        blocks: blocks of each tensor.
        block_tokens: tokens of a block, by vLLM's name of the layer.

    Attributes:
        adapters: the adapters of the models; None if they take none.

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
        """Return 32 bytes that name what the worker computes with now.

        Raises:
            ConfigError: an option or a tensor that cannot be digested.
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
        """Digest of packed weights: of the files at start, random once they were repacked."""
        objects = _objects(self._models)
        # Attributes that have come since are of no account: compilation adds some.
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
    """The functions and kernels that modules hold; one that packs weights again makes new ones."""
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
    """The digest of the files of weights; random if there are none on this machine."""
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
    """One digest of those of all ranks, in their order."""
    return hashlib.blake2b(b"".join(digests), digest_size=32).digest()
