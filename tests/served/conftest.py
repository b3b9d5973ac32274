"""Import path of this folder, and options `--next` and `--vllm`.

`--vllm 0.31` tests in the environment of that version of vLLM, `--next` in the one of `NEXT`, which
has its Python files and the kernels of the version before. Tests marked `since("0.31")` need at
least that version.
"""

import hashlib
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

NEXT = "0.33"


def pytest_addoption(parser):
    parser.addoption("--next", action="store_true", help=f"test in vLLM's next version, {NEXT}")
    parser.addoption("--vllm", help="the version of vLLM that is installed for this interpreter")


def _vllm():
    """The installed version of vLLM, as two numbers; None without one."""
    try:
        return tuple(map(int, version("vllm").split(".")[:2]))
    except PackageNotFoundError:
        return None


def pytest_configure(config):
    wanted = NEXT if config.getoption("--next") else config.getoption("--vllm")
    if wanted and _vllm() != tuple(map(int, wanted.split("."))):
        raise pytest.UsageError(f"vLLM {wanted} wanted, {_vllm()} is installed")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("since"):
        if (_vllm() or (99,)) < tuple(map(int, mark.args[0].split("."))):
            pytest.skip(f"vLLM {mark.args[0]} or later")


@pytest.fixture
def logged():
    """The lines that kvtrie and vLLM log; pytest's own fixture for them is off here."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("kvtrie", "vllm")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def page_hashes(monkeypatch):
    """A chain of digests in place of SGLang's own, which it would have to compile here."""

    def chained(ids, before, page_size):
        raw, hashes = ids.raw_token_ids(), []
        for first in range(0, len(ids), page_size):
            page = raw[first : first + page_size].tobytes()
            before = hashlib.sha256((before or b"") + page).digest()
            hashes.append(before.hex())
        return hashes

    monkeypatch.setattr("sglang.srt.mem_cache.utils.get_native_hash", chained)
