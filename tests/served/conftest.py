"""Import path of this folder, and option `--next`: test vLLM's next version instead of ours."""

import hashlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--next", action="store_true", help="compare with vLLM's next version only")


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--next")
    left = [item for item in items if bool(item.get_closest_marker("next")) != wanted]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def sources():
    """Sources in the wheel of vLLM's next version."""
    from surface_of_sources import Sources, next_wheel

    root = Path(__file__).parents[2]
    return Sources(next_wheel(root / "target" / "vllm-next", root / ".venv" / "bin" / "python"))


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
