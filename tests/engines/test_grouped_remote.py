"""Models of windows and states over a shared store: another process finds what one has stored."""

from collections import Counter
from pathlib import Path

import pytest
from grouped_serving import BLOCK, ask, serve, some
from tinymodels import agree, answer

from kvtrie import ResumePoints
from kvtrie.demo.families import family
from kvtrie.engines import transformers as engine
from kvtrie.engines.transformers.open_model import close_executor

pytestmark = pytest.mark.engine

BORDER = 4 * BLOCK  # the longest of the prompt before its last token


@pytest.fixture(scope="module", params=["gemma-3", "qwen3-next"])
def model(request):
    return family(request.param)


@pytest.fixture(scope="module")
def ids():
    return some(70, 1, BORDER + 5)


def values(store):
    """The files of each group of a store in a folder."""
    lengths = [part.form.value_bytes for part in store.groups]
    files = [[] for _ in lengths]
    for path in Path(str(store.url.path)).glob("??/*"):
        files[lengths.index(path.stat().st_size)].append(path)
    return files


def played(model, ids, folder, disk=None):
    """Answer a prompt in fresh tiers; return tokens found, files of each group, and counters.

    The tokens are counted before a load starts: a load that fails shortens its lease at any time.
    """
    executor = serve(model, gpu=40, host=60, remote=folder, disk=disk)
    ask(model, executor, ids)
    found = ids.shape[1] - executor.missed_tokens.total()
    executor.drain()
    executor.manager.audit()
    files, counts = values(executor.pools[-1]), Counter(executor.pools[-1].stats().results)
    close_executor(executor)
    return found, files, counts


@pytest.mark.grid
@pytest.mark.parametrize("disk", [False, True])
def test_a_second_cache_finds_what_the_first_has_stored(model, ids, disk, tmp_path):
    for process, expected in enumerate((0, BORDER, BORDER)):
        local = tmp_path / f"disk{process}" if disk else None
        found, files, _ = played(model, ids, tmp_path / "kv", local)
        assert found == expected
        assert all(files)


def test_open_shares_a_store_of_several_groups(model, ids, tmp_path):
    truth = answer(model, ids)
    tiers = {"gpu": "1MB", "host": "1MB", "block_tokens": BLOCK, "remote": f"folder:{tmp_path}/kv"}
    for expected in (0, BORDER):
        with engine.open(model, **tiers, resume=ResumePoints()) as served:
            executor = served.executor
            prompt, scope = ids[0].numpy(), served.scope
            executor.prefetch(prompt, scope=scope, deadline_s=30.0)
            found = executor.manager.lookup(prompt, now=executor.clock(), scope=scope)
            assert found.tokens == expected
            with served.cache(ids, reserve=8) as cache:
                agree(truth, answer(model, ids, cache))
            executor.drain()


@pytest.mark.grid
@pytest.mark.parametrize("way", ["missing", "damaged", "foreign"])
@pytest.mark.parametrize("group", [0, 1])
def test_without_the_values_of_one_group_a_prompt_is_computed(model, ids, group, way, tmp_path):
    _, files, _ = played(model, ids, tmp_path)
    others = [path.read_bytes() for path in files[1 - group]]
    for path in files[group]:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        if way == "missing":
            path.unlink()
        else:
            path.write_bytes(raw if way == "damaged" else others[0])
    found, _, counts = played(model, ids, tmp_path)
    # The store says that it has a damaged value: its load fails.
    assert (found, counts["get", "damaged"] > 0) == (
        (BORDER, True) if way == "damaged" else (0, False)
    )
    # The prompt was computed, here or by the next request, and its values are stored again.
    played(model, ids, tmp_path)
    assert played(model, ids, tmp_path)[0] == BORDER
