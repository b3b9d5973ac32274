"""Models of several groups of layers over host memory and a disk in another format.

KV of each group is converted on its way down and up, a state is copied as it is.
"""

import copy

import pytest
import torch
from grouped_serving import BLOCK, allowed, apart, ask, push, serve, some
from tinymodels import answer

from kvtrie import ResumePoints, Tier
from kvtrie._kvtrie import DiskStore
from kvtrie.demo.families import family
from kvtrie.engines.transformers import KvtrieCache, model_shape
from kvtrie.engines.transformers.open_model import close_executor
from kvtrie.errors import ConfigError
from kvtrie.model.group_layout import group_bytes
from kvtrie.model.layout import FORMATS
from kvtrie.tiers import open_pools

pytestmark = pytest.mark.engine

HEAD = 32
# Share of native bytes (float32 numbers and scales), and how far logits, which span about 5, may be
# off.
COSTS = {"int8": (0.29, 0.05), "fp8": (0.29, 0.3), "int4": (0.36, 0.8)}


def wide(name):
    """A family's model with heads that every format takes."""
    base = family(name)
    config = copy.deepcopy(base.config)
    config.head_dim = HEAD
    torch.manual_seed(1)
    return type(base)(config).eval()


@pytest.fixture(scope="module", params=["gemma-3", "falcon-h1"])
def model(request):
    return wide(request.param)


@pytest.mark.grid
@pytest.mark.parametrize("name", COSTS)
def test_kv_comes_back_from_another_format_and_states_as_they_were(model, name):
    share, off = COSTS[name]
    executor = serve(model, gpu=20, host=200, points=6, layout=FORMATS[name])
    shape = executor.manager.model
    native, coded = group_bytes(shape, BLOCK), group_bytes(shape, BLOCK, FORMATS[name])
    for group, before, after in zip(shape.groups, native, coded, strict=True):
        assert after <= (before if group.kind == "state" else share * before)
    ids = some(60, 1, 4 * BLOCK + 3)
    sequence, _ = ask(model, executor, ids)
    push(model, executor, 6)
    host = executor.manager.stats().tiers["host"]
    held = sum(slots.held * size for slots, size in zip(host.groups, coded, strict=True))
    assert 0 < held < executor.pools[1].nbytes
    longer = torch.cat([sequence, some(61, 1, 5)], dim=1)
    truth = answer(model, longer)
    with KvtrieCache(model, executor, longer, reserve=8) as cache:
        assert cache.leases[0].matched == 5 * BLOCK
        mine = answer(model, longer, cache)
    # Up to the first token that differs, where the margin is below the rounding of both logits.
    assert 1e-6 < apart(truth, mine) < off
    assert executor.manager.stats().tiers["host"].promoted >= 5
    executor.manager.audit()
    executor.close()


@pytest.mark.parametrize("group", [0, 1])
def test_damaged_scales_of_any_group_are_a_miss(model, group, tmp_path):
    layout = FORMATS["int4"]
    ids = some(62, 1, 4 * BLOCK + 3)
    executor = serve(model, gpu=40, host=60, disk=tmp_path, layout=layout)
    sequence, _ = ask(model, executor, ids)
    executor.save()
    folder = executor.pools[2].groups[group].store.folder
    fmt = executor.pools[1].groups[group].block_format
    close_executor(executor)
    # The scales follow the numbers of K or, if K and V are joined, of both; a state has none.
    numbers = BLOCK * fmt.heads * HEAD // (2 if fmt.layout.kv == "split" else 1)
    damage(folder, numbers + 2)
    executor = serve(model, gpu=40, host=60, disk=tmp_path, layout=layout)
    assert executor.restore() > 0
    longer = torch.cat([sequence, some(63, 1, 5)], dim=1)
    truth = answer(model, longer)
    with KvtrieCache(model, executor, longer, reserve=8) as cache:
        mine = answer(model, longer, cache)
        assert cache.leases[0].matched == 0
    assert apart(truth, mine) < allowed(model, longer, truth)
    executor.manager.audit()
    close_executor(executor)


def damage(folder, at):
    """Flip a bit at this place of every layer of every block of a store."""
    store = DiskStore.inspect(folder)
    stride = -(-store.layer_bytes // 4096) * 4096
    assert at < store.layer_bytes
    segment = folder / "segment-00000"
    data = bytearray(segment.read_bytes())
    for slot, *_ in store.blocks(10**18):
        for layer in range(store.layers):
            data[(slot + 1) * store.slot_bytes - (store.layers - layer) * stride + at] ^= 4
    segment.write_bytes(data)
    store.close()


def test_heads_that_a_format_cannot_hold_are_refused_by_their_size():
    shape = model_shape(family("gemma-3"))
    tiers = [Tier("gpu", bytes="1MB"), Tier("host", bytes="1MB", layout=FORMATS["int4"])]
    with pytest.raises(ConfigError, match="a head of 8 numbers is no multiple of 16"):
        open_pools(shape, tiers, BLOCK, resume=ResumePoints())
