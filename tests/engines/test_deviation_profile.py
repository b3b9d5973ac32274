"""A measured deviation profile as input of a fusion: which tokens it computes, and how many."""

from __future__ import annotations

import pytest
import torch
from fusing import context_of, decoder_of, ids_of, last_logits, plain, world

from kvtrie.errors import ConfigError
from kvtrie.fuse import Controller, DeviationProfile, Fusor
from kvtrie.fuse.gate import divergence
from kvtrie.fuse.passes import PassTable
from kvtrie.fuse.profile import Profile

SIZES = (20, 20, 20)
TOKENS = sum(SIZES)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def measured():
    """A model, a context, and the profile of its full recomputation."""
    model, decoder = decoder_of()
    context = context_of(decoder, SIZES)
    with Fusor(decoder, select="all", ratio=1.0).fuse(context) as fused:
        profile = DeviationProfile.measured(fused)
    return model, decoder, context, profile


def test_a_full_fusion_measures_rankings_and_shares(measured):
    _, decoder, _, profile = measured
    assert set(profile.rankings) == set(range(decoder.layers))
    for ranking in profile.rankings.values():  # the first chunk is exact, so it is not computed
        assert sorted(ranking) == list(range(SIZES[0], TOKENS))
    assert len(profile.shares) == decoder.layers
    assert list(profile.shares) == sorted(profile.shares, reverse=True)
    assert 0 < profile.shares[0] < 1
    assert profile.scaled(0.1, decoder.layers) != profile.shares
    assert sum(profile.scaled(0.1, decoder.layers)) / decoder.layers == pytest.approx(0.1)


def test_a_ranking_chooses_the_tokens_and_what_layers_keep(measured):
    _, decoder, context, profile = measured
    ratios = (0.4, 0.4, 0.2, 0.1)
    with Fusor(decoder, select=profile, ratio=ratios).fuse(context) as fused:
        grid = fused.log.grid[:, slice(*fused.log.span)]
    chosen = set(profile.rankings[0][: round(0.4 * TOKENS)])
    for layer, ratio in enumerate(ratios):
        kept = [token for token in profile.rankings[layer] if token in chosen]
        chosen = set(kept[: round(ratio * TOKENS)])
        assert set(grid[layer].nonzero()[0].tolist()) == chosen


def test_a_ranking_of_one_layer_and_of_some_tokens_serves(measured):
    _, decoder, context, _ = measured
    profile = DeviationProfile({2: [50, 21, 33]})
    with Fusor(decoder, select=profile, ratio=0.1).fuse(context) as fused:
        grid = fused.log.grid[:, slice(*fused.log.span)]
    # Six tokens: those of the ranking, and of the others the first that may be wrong.
    assert grid[0].nonzero()[0].tolist() == [20, 21, 22, 23, 33, 50]


def test_shares_are_ratios(measured):
    _, decoder, context, profile = measured
    for ratio in (profile, profile.shares):
        with Fusor(decoder, select="values", ratio=ratio, at=0).fuse(context) as fused:
            counts = fused.log.grid[:, slice(*fused.log.span)].sum(axis=1)
        assert counts.tolist() == [round(share * TOKENS) for share in profile.shares]


def test_tokens_of_a_profile_lower_the_error(measured):
    model, decoder, context, profile = measured
    right = last_logits(model, ids_of(context)[None])
    apart = []
    for given in ({"ratio": 0.0}, {"ratio": 0.4, "select": profile}, {"ratio": 1.0}):
        with Fusor(decoder, **given).fuse(context) as fused:
            apart.append(divergence(right, last_logits(model, fused.ids, fused.cache)))
    assert apart[0] > apart[1] > apart[2]


def test_a_controller_spreads_its_ratio_over_the_shares():
    model, decoder = decoder_of()
    store, _ = world(model)
    passes = PassTable((0, 512), (1, 512), ((1e6, 1e8), (1e6, 1e8)))
    profile = Profile(cost=None, lanes={}, both={}, passes=passes)
    deviation = DeviationProfile(shares=(0.6, 0.4, 0.2))
    controller = Controller(profile, store, deviation=deviation)
    assert controller.floor == pytest.approx((0.6 + 0.4 + 0.2 + 0.2) / 4)
    with Fusor(decoder, store, controller=controller, select="first").fuse(plain(SIZES)) as fused:
        shares = fused.log.shares
    ratio = controller.estimate.ratio
    assert ratio >= controller.floor
    wanted = deviation.scaled(ratio, decoder.layers)
    assert shares == pytest.approx([min(each, 2 / 3) for each in wanted], abs=1 / TOKENS)
    assert Controller(profile, store, floor=0.5, deviation=deviation).floor == 0.5
    with pytest.raises(ConfigError, match="without shares"):
        Controller(profile, store, deviation=DeviationProfile({0: [1]}))


def test_a_profile_is_read_as_it_was_written(measured, tmp_path):
    *_, profile = measured
    path = tmp_path / "profile.json"
    profile.write(path)
    assert DeviationProfile.read(path) == profile
    with pytest.raises(ConfigError, match="cannot write"):
        profile.write(tmp_path / "none" / "profile.json")
    for text in (
        "",
        "[]",
        '{"rankings": {"x": []}, "shares": []}',
        '{"rankings": 3, "shares": []}',
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile.json is no deviation profile"):
            DeviationProfile.read(path)


def test_profiles_that_cannot_be_are_refused(measured):
    _, decoder, context, _ = measured
    for wrong, message in (
        ({}, "has rankings or shares"),
        ({"rankings": {0: []}}, "has rankings or shares"),
        ({"rankings": {0: [1, 1]}}, r"rankings\[0\] names 1 tokens twice"),
        ({"rankings": {-1: [1]}}, "a layer of rankings is -1"),
        ({"rankings": {0: [-1]}}, r"rankings\[0\] is -1"),
        ({"shares": (0.1, 0.2)}, "none larger than the previous one wanted"),
        ({"shares": (1.5,)}, r"shares\[0\] is 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            DeviationProfile(**wrong)
    with pytest.raises(ConfigError, match="without rankings"):
        Fusor(decoder, select=DeviationProfile(shares=(0.2,)))
    with pytest.raises(ConfigError, match="without shares"):
        Fusor(decoder, ratio=DeviationProfile({0: [1]}))
    for profile, message in (
        (DeviationProfile({0: [TOKENS]}), f"ranks token {TOKENS}, the context's chunks have"),
        (DeviationProfile({decoder.layers: [1]}), "has 5 layers, the model 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            Fusor(decoder, select=profile).fuse(context)
    with Fusor(decoder, ratio=0.0).fuse(context) as fused:
        assert torch.equal(fused.ids[0], ids_of(context))
        with pytest.raises(ConfigError, match="computed no token"):
            DeviationProfile.measured(fused)
