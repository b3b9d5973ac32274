"""Groups of layers: which are refused, how many bytes they take, and what names them."""

import dataclasses

import pytest

from kvtrie import BlockManager, ConfigError, LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.meaning import meaning

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="groups")
FULL, SLIDING = LayerGroup((0, 1)), LayerGroup((2, 3), kind="sliding", window=64)
STATE = LayerGroup((2, 3), kind="state", state_bytes=1000)


def of(*groups, **change):
    return dataclasses.replace(MODEL, groups=groups, **change)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LayerGroup((0,), kind="round"), "round"),
        (lambda: LayerGroup((1, 0)), r"\(1, 0\)"),
        (lambda: LayerGroup(()), r"ascending layers, not \(\)"),
        (lambda: LayerGroup(range(10**12)), "more than 65535"),
        (lambda: LayerGroup((0.5,)), r"layer of a group is 0\.5"),
        (lambda: LayerGroup((0,), kind="sliding"), "'sliding' has window 0"),
        (lambda: LayerGroup((0,), kind="chunked"), "'chunked' has window 0"),
        (lambda: LayerGroup((0,), window=7), "'full' has window 7"),
        (lambda: LayerGroup((0,), kind="state", window=7, state_bytes=4), "'state' has window 7"),
        (lambda: LayerGroup((0,), sinks=4), "'full' has 4 sinks"),
        (lambda: LayerGroup((0,), kind="chunked", window=9, sinks=4), "'chunked' has 4 sinks"),
        (lambda: LayerGroup((0,), kind="state"), "state_bytes None"),
        (lambda: LayerGroup((0,), state_bytes=8), "'full' has state_bytes 8"),
        (lambda: LayerGroup((0,), kind="state", state_bytes=0), "state_bytes .* 0, 1 to"),
        (lambda: LayerGroup((0,), kind="state", state_bytes=8, head_dim=4), "not head_dim"),
        (lambda: LayerGroup((0,), kind="state", state_bytes=8, tokens_per_row=4), "tokens_per_row"),
        (lambda: LayerGroup((0,), kind="chunked", window=8, latent=True), "not 'chunked'"),
        (lambda: LayerGroup((0,), head_dim=0), "head_dim of a layer group is 0, 1 to"),
        (lambda: LayerGroup((0,), latent=1), "latent of a layer group is 1"),
        (lambda: LayerGroup((0,), dtype="float31"), "float31"),
        (lambda: LayerGroup((0,), tokens_per_row=0), "tokens_per_row is 0, 1 to"),
        (lambda: of(LayerGroup((3, 4))), "group 0 names layer 4, the model has layers 0 to 3"),
        (lambda: of(FULL, LayerGroup((1, 2))), "layer 1 is in groups 0 and 1, which both keep KV"),
        (
            lambda: of(STATE, LayerGroup((3,), kind="state", state_bytes=8)),
            "layer 3 is in groups 0 and 1, which both keep a state",
        ),
        (lambda: of(LayerGroup((0,), kv_heads=6), tp=4), "6 KV heads of group 0 .* 4 ranks"),
        (lambda: of(FULL, STATE).layer_bytes(16), "do not keep the same KV .*state:2-3"),
        (lambda: of(FULL, STATE).layer_bytes(16, 1), "group 1 keeps a state"),
        (lambda: of(FULL).layer_bytes(16), "do not keep the same KV"),
        (lambda: of(FULL, SLIDING).layer_bytes(16, 2), "group is 2, 0 to 1"),
        (lambda: MODEL.block_bytes(16, 1), "group is 1, 0 to 0"),
        (
            lambda: of(LayerGroup((0,), tokens_per_row=128)).layer_bytes(64, 0),
            "block_tokens is 64, a multiple of tokens_per_row 128 of group 0",
        ),
    ],
)
def test_a_group_that_cannot_be_is_a_configerror(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_group_takes_the_bytes_of_its_own_shape():
    wide = LayerGroup((2, 3), kind="sliding", window=64, kv_heads=4, head_dim=32, dtype="float16")
    shape = of(FULL, wide)
    assert MODEL.block_bytes(16) == MODEL.block_bytes(16, 0) == 4 * 16 * 2 * (8 + 8) * 4
    assert shape.layer_bytes(16, 0) == 16 * 2 * (8 + 8) * 4
    assert shape.layer_bytes(16, 1) == 16 * 4 * (32 + 32) * 2
    assert shape.block_bytes(16) == 2 * shape.layer_bytes(16, 0) + 2 * shape.layer_bytes(16, 1)
    # A layer has KV and a state in hybrid heads, and neither in a layer without attention.
    both = of(LayerGroup((0, 1)), LayerGroup((1, 2), kind="state", state_bytes=1000))
    assert (both.block_bytes(16), both.block_bytes(16, 1)) == (2 * both.layer_bytes(16, 0), 1000)
    halves = of(FULL, wide, tp=2)
    assert halves.layer_bytes(16, 1) == shape.layer_bytes(16, 1) // 2


def test_a_latent_row_has_two_widths_and_a_compressed_group_fewer_rows():
    latent = LayerGroup((0, 1, 2, 3), kv_heads=1, head_dim=512, v_head_dim=64, latent=True)
    shape = of(latent, dtype="bfloat16")
    assert shape.layer_bytes(16, 0) == 16 * (512 + 64) * 2
    whole = ModelShape(4, 1, 512, "bfloat16", v_head_dim=64, latent=True)
    assert whole.layer_bytes(16, 0) == 16 * (512 + 64) * 2
    rows = [of(LayerGroup((0,), tokens_per_row=n)).layer_bytes(256, 0) for n in (1, 4, 128)]
    assert rows == [256 * 128, 64 * 128, 2 * 128]


@pytest.mark.parametrize(
    "shape",
    [
        of(FULL, STATE),
        of(FULL),
        of(FULL, dataclasses.replace(SLIDING, head_dim=16)),
        of(LayerGroup((0, 1, 2, 3), tokens_per_row=4)),
        dataclasses.replace(MODEL, latent=True, v_head_dim=4),
    ],
)
def test_layers_that_are_not_alike_have_no_pool_and_no_manager(shape):
    assert not shape.even
    with pytest.raises(ConfigError, match="do not keep the same KV"):
        BlockManager(shape, [Tier("gpu", blocks=4)])
    with pytest.raises(ConfigError, match="do not keep the same KV"):
        BlockFormat.of(shape, None, 16)


@pytest.mark.parametrize(
    ("groups", "room", "said"),
    [
        (
            (FULL, dataclasses.replace(SLIDING, tokens_per_row=3)),
            {"blocks": 4},
            "block_tokens is 16, a multiple of tokens_per_row 3 of group 1 wanted",
        ),
        (
            (FULL, dataclasses.replace(STATE, state_bytes=100_000)),
            {"blocks": 1},
            "104096 bytes are 1 pages of 100000: 2 are wanted for one block and one resume point",
        ),
        (
            (FULL, SLIDING),
            {"bytes": 2 * 4096 - 1},
            "8191 bytes are 1 pages of 4096: 2 are wanted for one block and one resume point",
        ),
    ],
)
def test_an_engine_tier_that_holds_no_block_and_resume_point_is_refused(groups, room, said):
    tiers = [Tier("gpu", owner="engine", **room), Tier("host", bytes="1MiB", owner="none")]
    with pytest.raises(ConfigError, match=said):
        BlockManager(of(*groups), tiers, block_tokens=16, resume=ResumePoints())


def test_shapes_that_differ_in_groups_have_different_names():
    shapes = [
        MODEL,
        of(FULL, SLIDING),
        of(FULL, dataclasses.replace(SLIDING, window=128)),
        of(FULL, dataclasses.replace(SLIDING, sinks=4)),
        of(FULL, dataclasses.replace(SLIDING, head_dim=16)),
        of(FULL, STATE),
        of(LayerGroup((0, 2)), LayerGroup((1, 3), kind="sliding", window=64)),
        of(FULL),
    ]
    assert len({shape.identity() for shape in shapes}) == len(shapes)
    layout = BlockFormat.of(MODEL, None, 16).layout
    assert len({meaning(shape, layout, 16, 0) for shape in shapes}) == len(shapes)
    # One group of all layers says no more than no group.
    alike = of(LayerGroup((0, 1, 2, 3)))
    assert alike.identity() == MODEL.identity()
    assert meaning(alike, layout, 16, 0) == meaning(MODEL, layout, 16, 0)
