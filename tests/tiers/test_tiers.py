"""`open_pools` and `Storage`: tiers become memory, or a disk, if their layouts agree."""

from dataclasses import replace

import keeping
import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.model.shape import ModelShape
from kvtrie.settings.tier import Tier
from kvtrie.tiers import Storage, open_pools

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="pools")


@pytest.mark.parametrize(
    ("layout", "difference"),
    [
        (Layout(alignment=512), "alignment 1 and 512"),
        (Layout(kv="split", rope="plain"), "kv joined and split, rope rotated and plain"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_tiers_with_different_layouts_are_refused(layout, difference, at, tmp_path):
    folder = tmp_path / "kv"
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=4),
        Tier("disk", blocks=4, path=str(folder)),
    ]
    tiers[at] = replace(tiers[at], layout=layout)
    if at == 0:  # the others are compared with the first
        difference = ", ".join(
            f"{name} {second} and {first}"
            for name, first, _, second in (one.split() for one in difference.split(", "))
        )
    above, below = at - 1 if at else 0, at or 1
    names = [f"tier {one} ({tiers[one].kind})" for one in (above, below)]
    pair = f"{names[0]} and {names[1]} differ: {difference}"
    with pytest.raises(ConfigError) as refused:
        open_pools(SHAPE, tiers, 8)
    assert str(refused.value) == pair
    assert not folder.exists()


def test_a_tier_that_is_not_opened_here_may_have_any_layout():
    layout = Layout(alignment=512)
    tiers = [Tier("gpu", blocks=2, layout=layout), Tier("disk", blocks=9)]
    assert open_pools(SHAPE, tiers, 8)[1] is None
    tiers = [Tier("gpu", blocks=2, owner="engine"), Tier("host", blocks=9, layout=layout)]
    assert open_pools(SHAPE, tiers, 8)[1].layout == layout


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 1), (0, 0)])
def test_a_rank_that_is_not_there_is_refused(rank, ranks):
    with pytest.raises(ConfigError, match=f"rank is {rank}, 0 to {ranks - 1} wanted"):
        open_pools(SHAPE, [Tier("gpu", blocks=2)], 8, rank=rank, ranks=ranks)


def test_pools_are_opened_for_the_tiers_that_have_memory():
    tiers = [
        Tier("gpu", blocks=2, layer_slots=True),
        Tier("host", bytes=5 * SHAPE.block_bytes(8)),
        Tier("disk", blocks=9),
    ]
    gpu, host, disk = open_pools(SHAPE, tiers, 8)
    assert (gpu.blocks, gpu.layer_slots) == (2, True)
    assert (host.blocks, host.layer_slots) == (5, False)
    assert disk is None
    assert open_pools(SHAPE, [Tier("gpu", blocks=2, owner="engine")], 8) == (None,)
    assert gpu.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_host_memory_is_pinned_if_there_is_a_gpu():
    gpu, host = open_pools(SHAPE, [Tier("gpu", blocks=2), Tier("host", blocks=2)], 8)
    assert gpu.device.type == "cuda"
    assert all(plane.is_pinned() for plane in host.planes)


def test_storage_is_a_protocol_that_a_disk_can_meet():
    class Shelf:
        def read(self, key, slot, layers, memory): ...

        def write(self, key, slot, layers, memory, label): ...

    assert isinstance(Shelf(), Storage)
    assert not isinstance(object(), Storage)


def test_a_refused_tier_leaves_the_blocks_of_a_disk_and_no_lock(tmp_path):
    prompts = [keeping.prompt(seed) for seed in range(6)]
    keeping.fill(tmp_path / "kv", prompts)
    before = keeping.rows(tmp_path / "kv")
    (tmp_path / "file").write_text("no folder")
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=4),
        Tier("disk", blocks=1, path=str(tmp_path / "kv")),
        Tier("remote", blocks=4, path=f"folder:{tmp_path}/file"),
    ]
    with pytest.raises(ConfigError, match="cannot be written"):
        open_pools(keeping.SHAPE, tiers, keeping.SIZE)
    assert keeping.rows(tmp_path / "kv") == before
    with keeping.serving(tmp_path / "kv") as executor:
        assert not executor.pools[2].read_only
        assert executor.restore() == len(before)
