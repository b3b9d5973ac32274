"""Kernels on the host: builds host.cpp for a pair of formats and talks to it.

Invariant: a call's tensors become what the kernel leaves in them, exactly as on a device. Cost:
half a second of g++ per pair, a second or two under a sanitizer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases import KERNELS, extent

from kvtrie.kernels.launch import Launch

HERE = Path(__file__).parent
CUDA = HERE.parent.parent / "cuda"
GPP = shutil.which("g++")
NEEDS_GPP = pytest.mark.skipif(GPP is None, reason="no g++, which compiles kernels for the host")
ORDER = ("paged_copy", *KERNELS, "pack_int4", "unpack_int4")  # as kernels.cpp lists them
ATTENTION = ("attend", "attend_backward", "attend_weights")  # as attend_kernels.cpp does
THREADS = 48  # of a block: several tokens where heads are small
SANITIZERS = {
    "none": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
STRICT = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}


class BrokenHostError(Exception):
    """The host program ended: what it said is the message."""


def compiled(source, to, *, sanitizer="none", macros=(), cuda=CUDA):
    """One object file, unless it is there; two workers may make it at the same time."""
    if to.exists():
        return to
    own = to.with_suffix(f".{os.getpid()}.o")
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += [*SANITIZERS[sanitizer], *(f"-D{each}" for each in macros), f"-I{cuda}"]
    subprocess.run([GPP, *flags, "-c", HERE / source, "-o", own], check=True)
    return own.replace(to)


class Host:
    """A process that runs the kernels for one pair of formats.

    With a `width` they are those of attention, for heads of up to this number of numbers.
    """

    def __init__(self, folder, row, cell, *, sanitizer="none", cuda=CUDA, width=0):
        runner = compiled("host.cpp", folder / f"host-{sanitizer}.o", sanitizer=sanitizer)
        pair = folder / f"{row}-{cell}-{sanitizer}-{width}"
        formats = (f"ROW={row}", f"CELL={cell}", *([f"WIDTH={width}"] if width else ()))
        self.order = ATTENTION if width else ORDER
        source = "attend_kernels.cpp" if width else "kernels.cpp"
        kernels = compiled(
            source, pair.with_suffix(".o"), sanitizer=sanitizer, macros=formats, cuda=cuda
        )
        own = Path(tempfile.mkdtemp(dir=folder))
        program, self.log = own / "host", own / "log"
        command = [GPP, "-pthread", *SANITIZERS[sanitizer], runner, kernels, "-o", program]
        subprocess.run(command, check=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | STRICT,
            )

    def run(self, call, *, threads=THREADS):
        """Do what a call says, as the kernel does it.

        Raises:
            BrokenHostError: a sanitizer stopped it, or it crashed.
        """
        self.start(call.kernel, Launch.of(call, threads=threads))

    def start(self, kernel, what):
        """Do what a launch says, as `run`."""
        ranges = joined(each for each in what.arguments if not isinstance(each, int))
        buffers = [(ctypes.c_char * (end - begin)).from_address(begin) for begin, end in ranges]
        request = [words(self.order.index(kernel), *what.grid, *what.block, len(buffers))]
        for memory in buffers:
            request += [words(len(memory)), bytes(memory)]
        request.append(words(len(what.arguments)))
        for each in what.arguments:
            if isinstance(each, int) or not extent(each):
                request.append(words(-1, each if isinstance(each, int) else 0))
                continue
            at = each.data_ptr()
            [which] = [n for n, (begin, end) in enumerate(ranges) if begin <= at < end]
            request.append(words(which, at - ranges[which][0]))
        try:
            self.process.stdin.write(b"".join(request))
            self.process.stdin.flush()
            answers = [self.process.stdout.read(len(memory)) for memory in buffers]
        except BrokenPipeError:
            answers = []
        if [len(each) for each in answers] != [len(memory) for memory in buffers]:
            self._end()
            raise BrokenHostError(self.log.read_text())
        for memory, answer in zip(buffers, answers, strict=True):
            memory[:] = answer

    def close(self):
        """End the process.

        Raises:
            BrokenHostError: it did not end well.
        """
        if self._end():
            raise BrokenHostError(self.log.read_text())

    def _end(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def words(*numbers):
    return np.array(numbers, np.int64).tobytes()


def joined(tensors):
    """The ranges of addresses that tensors cover, those that overlap as one."""
    spans = sorted((each.data_ptr(), each.data_ptr() + extent(each)) for each in tensors)
    ranges = []
    for begin, end in spans:
        if begin == end:
            continue
        if ranges and begin < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    return ranges


def pair_of(call):
    """The formats, as CUDA names them, that a call's kernel is compiled for."""
    what = Launch.of(call)
    return what.row, what.cell
