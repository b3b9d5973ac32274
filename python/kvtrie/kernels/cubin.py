"""Cubin: a kernel compiled for an architecture by NVRTC, with or without a GPU in the machine.

Kernels are compiled to machine code for a named architecture. This needs no driver, and the result
also runs with a driver older than the compiler. Results are kept in the program cache of cuda.core
(`~/.cache/cuda-python/program-cache`), shared between processes and keyed by text, options and
compiler. Each entry is verified on reading and compiled again if damaged.
Invariant: the text comes from the extension, never from files. Cost: about 0.1 s for each kernel
and pair of formats at first use, under a millisecond from the cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import re
from typing import TYPE_CHECKING, Any

from kvtrie._kvtrie import KERNELS
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from kvtrie.kernels.call import Kernel

__all__ = ["ARCHS", "compiled", "core", "launchable", "loaded", "text"]

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures compiled for in tests. All architectures of compute 8.0 and up work."""

_LOG = logging.getLogger(__name__)
_PROOF_BYTES = 32
_INCLUDE = re.compile(r'#include "(\w+\.cuh)"\n')


@functools.cache
def core() -> Any:  # noqa: ANN401 - the module cuda.core, not typed
    """Return cuda.core, NVIDIA's Python interface to the driver and NVRTC.

    Raises:
        ConfigError: the extra `cuda` is not installed.
    """
    try:
        importlib.import_module("cuda.core.utils")
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise ConfigError(
            f"kernels need the extra `cuda` ({error}): install kvtrie[cuda]"
        ) from error


@functools.cache
def launchable() -> bool:
    """Return whether the extra `cuda` is installed."""
    try:
        core()
    except ConfigError:
        return False
    return True


def text(kernel: Kernel) -> str:
    """Return the source of a kernel with its includes inlined."""
    return _with_includes(f"{kernel}.cu")


def compiled(
    kernel: Kernel,
    arch: str,
    row: str,
    cell: str,
    *,
    width: int = 0,
    cache: Path | str | None = None,
    logs: TextIO | None = None,
) -> Any:  # noqa: ANN401 - cuda.core's ObjectCode, without importing cuda.core
    """Compile a kernel, or read it from the cache.

    Args:
        kernel: its name.
        arch: as in `ARCHS`.
        row: format of rows: "fp32", "fp16" or "bf16".
        cell: format of the pool: "fp32", "fp16", "bf16", "fp8" or "int8".
        width: numbers of a head with room in a block, for the kernels of attention.
        cache: folder of the cache. None takes the folder of cuda.core.
        logs: target of the compiler's report. Disables the caches.

    Returns:
        An `ObjectCode` of cuda.core. `.code` is the cubin.

    Raises:
        ConfigError: the extra `cuda` is not installed.
    """
    cuda = core()
    options = cuda.ProgramOptions(
        std="c++17",
        arch=arch,
        name=f"{kernel}.cu",
        define_macro=[("ROW", row), ("CELL", cell), *([("WIDTH", str(width))] if width else [])],
        fma=False,  # rounds products like the twins: the same bits everywhere
        ptxas_options=["-v"] if logs else None,
        no_cache=logs is not None,  # NVRTC's own cache, used with a driver, gives no report
    )
    program = cuda.Program(text(kernel), "c++", options)
    if logs is not None:
        return program.compile("cubin", logs=logs)
    try:
        with cuda.utils.FileStreamProgramCache(cache) as programs:
            key = cuda.utils.make_program_cache_key(
                code=text(kernel), code_type="c++", options=options, target_type="cubin"
            )
            entry: bytes = programs.get(key) or b""
            proof, code = entry[:_PROOF_BYTES], entry[_PROOF_BYTES:]
            if proof == _proof(key, code):
                return cuda.ObjectCode.from_cubin(code, name=options.name)
            made = program.compile("cubin")
            programs[key] = _proof(key, made.code) + made.code
            return made
    except OSError as error:
        _LOG.warning("compiled kernels cannot be kept: %s", error)
        return program.compile("cubin")


def _proof(key: bytes, code: bytes) -> bytes:
    """Return the prefix of a cubin in the cache. Damaged and foreign entries lack it."""
    return hashlib.blake2b(key + code, digest_size=_PROOF_BYTES).digest()


@functools.cache
def loaded(kernel: Kernel, arch: str, row: str, cell: str, width: int = 0) -> Any:  # noqa: ANN401 - as above
    """Return a kernel ready to launch, compiled at most once per process.

    Raises:
        ConfigError: no CUDA driver, or as for `compiled`.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # checked first: without it cuda.core's first call hangs
    except OSError as error:
        raise ConfigError(f"no CUDA driver on this machine: {error}") from error
    return compiled(kernel, arch, row, cell, width=width).get_kernel(kernel)


def _with_includes(name: str) -> str:
    lines = KERNELS[name].replace("#pragma once\n", "\n")
    found = _INCLUDE.search(lines)
    if found is None:
        return f'#line 1 "{name}"\n{lines}'
    after = lines.count("\n", 0, found.end()) + 1
    head, tail = lines[: found.start()], lines[found.end() :]
    included = _with_includes(found[1])
    return f'#line 1 "{name}"\n{head}{included}#line {after} "{name}"\n{tail}'
