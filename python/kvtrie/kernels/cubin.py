"""Cubin: a kernel compiled for one architecture, by NVRTC, with or without a GPU in the machine.

Compiled to machine code for a named architecture: that needs no driver, and a driver takes it
even where it is older than the compiler. Kept in the program cache of cuda.core
(`~/.cache/cuda-python/program-cache`), which is shared between processes and keyed by text,
options and compiler; each entry is verified when it is read, and compiled again if it is damaged.
Invariant: the text comes from the extension; no files are looked for. Cost: about 0.1 s for each
kernel and pair of formats at first use, under a millisecond from the cache.
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
"""Architectures that every kernel is compiled for in tests; others of compute 8.0 and up work."""

_LOG = logging.getLogger(__name__)
_PROOF_BYTES = 32
_INCLUDE = re.compile(r'#include "(\w+\.cuh)"\n')


@functools.cache
def core() -> Any:  # noqa: ANN401 - the module cuda.core, which types cannot follow
    """NVIDIA's Python face of the driver and of NVRTC.

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
    """Whether the extra `cuda` is here."""
    try:
        core()
    except ConfigError:
        return False
    return True


def text(kernel: Kernel) -> str:
    """The source of a kernel with what it includes put in its place."""
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
    """Compile a kernel, or take it from the cache.

    Args:
        kernel: its name.
        arch: as in `ARCHS`.
        row: format of rows: "fp32", "fp16" or "bf16".
        cell: format of the pool: those, "fp8" or "int8".
        width: numbers of a head that a block has room for, of the kernels of attention.
        cache: folder of the cache; None takes that of cuda.core.
        logs: where the compiler's report goes; with it caches are passed over.

    Returns:
        An `ObjectCode` of cuda.core; `.code` is the cubin.

    Raises:
        ConfigError: the extra `cuda` is not installed.
    """
    cuda = core()
    options = cuda.ProgramOptions(
        std="c++17",
        arch=arch,
        name=f"{kernel}.cu",
        define_macro=[("ROW", row), ("CELL", cell), *([("WIDTH", str(width))] if width else [])],
        fma=False,  # products are rounded as the twins round them: the same bits everywhere
        ptxas_options=["-v"] if logs else None,
        no_cache=logs is not None,  # NVRTC with a driver has a cache too, which gives no report
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
    """The prefix of a cubin in the cache; damaged and foreign entries do not have it."""
    return hashlib.blake2b(key + code, digest_size=_PROOF_BYTES).digest()


@functools.cache
def loaded(kernel: Kernel, arch: str, row: str, cell: str, width: int = 0) -> Any:  # noqa: ANN401 - as above
    """A kernel ready to launch, compiled at most once per process.

    Raises:
        ConfigError: no CUDA driver, or as `compiled`.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # asked first: without it cuda.core's first call hangs
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
