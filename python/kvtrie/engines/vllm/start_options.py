"""Digest of all start options of a vLLM engine, except for fields without effect on KV.

It covers vLLM's configuration field by field, vLLM's environment variables, the versions of
libraries with kernels, and the files of a multimodal processor. `excluded` lists the omitted
fields.
Invariant: equal options have equal digests in every process of every server. An option missing in
`excluded` changes the digest.
Cost: some milliseconds.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.identity.start_options import device, digest_of, variables_of, versions
from kvtrie.engines.identity.weights import checkpoint_folder, files_digest
from kvtrie.engines.vllm.excluded import FIELDS, VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ModelConfig, VllmConfig

__all__ = ["encoding", "environment", "options_digest"]


def encoding() -> Encoding:
    """Return the encoding of vLLM's configuration."""
    from transformers import PreTrainedConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    return Encoding(excluded=FIELDS, records=(PreTrainedConfig, QuantizationConfig))


def options_digest(config: VllmConfig) -> bytes:
    """Return a 32-byte digest of all engine options with an effect on KV.

    Raises:
        ConfigError: an option has no canonical encoding.
        OSError: a processor's file cannot be read.
    """
    parts = {
        "vllm_config": config,
        "environment": environment(),
        "versions": {"vllm.__version__": import_module("vllm").__version__, **versions()},
        "device": device(config.device_config.device_type),
        "processor": _processor_files(config.model_config),
    }
    return digest_of(parts, encoding())


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return vLLM's environment variables, without excluded variables.

    Args:
        variables: all environment variables, or None for this process's variables.
    """
    known = set(import_module("vllm.envs").environment_variables)
    return variables_of(
        os.environ if variables is None else variables,
        lambda name: name in known or name.startswith("VLLM_"),
        VARIABLES,
    )


def _processor_files(model: ModelConfig) -> bytes | None:
    """Return the digest of a multimodal processor's files, or None without any."""
    if model.multimodal_config is None:
        return None
    folder = checkpoint_folder(model.model, model.revision, None)
    if folder is None or not folder.is_dir():
        return None
    files = [file for file in folder.iterdir() if "processor" in file.name and file.is_file()]
    return files_digest(sorted(files))
