"""A user's policies on each base."""

from __future__ import annotations

import pytest
import torch
from decoders import make
from playing import SIZES, step

from kvtrie.errors import ConfigError
from kvtrie.kernels import attend_causal
from kvtrie.selective import (
    AttnWeightsKVCache,
    AttnWeightsReplayLog,
    CacheSettings,
    DefaultKVCache,
    KVCache,
    KVCacheWithBuffers,
    SelectiveCache,
    make_cache,
    register,
)
from kvtrie.selective.buffers import Place
from kvtrie.selective.names import BUFFERS

PLACE = Place((2, 2, 8, 16), torch.float32, torch.device("cpu"))


class Monolith(KVCache):
    """The bare interface around what does everything by itself: it keeps all tokens."""

    def __init__(self):
        self.scale = self.replay_log = None
        self.reset()

    def forward(self, query, key, value):
        self.held = [torch.cat(pair, dim=2) for pair in zip(self.held, (key, value), strict=True)]
        self.input_pos += key.shape[2]
        square = torch.nn.functional.pad(query, (0, 0, self.input_pos - key.shape[2], 0))
        return attend_causal(square, *self.held)[:, :, -key.shape[2] :]

    @property
    def token_pos(self):
        return torch.arange(self.input_pos).expand(2, 2, -1)

    @property
    def scores(self):
        return torch.zeros(2, 2, self.input_pos)

    def keys_values(self):
        return tuple(self.held)

    @property
    def largest_step(self):
        return 2**31

    def reset(self):
        self.input_pos = 0
        self.held = [torch.zeros(2, 2, 0, 16)] * 2


class InLists(DefaultKVCache):
    """Its rows are tensors in a list; the oldest go. Attention is the base's."""

    def __init__(self):
        super().__init__(PLACE, 4)
        self.rows = [None] * self.cache_length

    def next_positions(self, new):
        start = self.input_pos + torch.arange(new)
        return (start % self.cache_length).expand(2, 2, new)

    def _fill(self, rows, positions, key, value):
        for at, row in enumerate(rows[0, 0].tolist()):
            self.rows[row] = key[:, :, at], value[:, :, at]
        self._token_pos.scatter_(2, rows, positions)

    def _overwrite(self, rows, key, value):
        positions = self.input_pos + torch.arange(key.shape[2])
        self._fill(rows, positions.expand_as(rows), key, value)

    def _rows_seen(self):
        return self.keys_values()

    def _end_step(self):
        pass

    def keys_values(self):
        return tuple(torch.stack(x, dim=2) for x in zip(*self.rows[: self.filled], strict=True))


class Middle(KVCacheWithBuffers):
    """The rows in the middle of the buffers go, whatever they hold."""

    def next_positions(self, new):
        start = (self.cache_length - new) // 2
        return torch.arange(start, start + new).expand(self.batch, self.kv_heads, new)

    def shrink(self, cache_length):
        self.check_shrink(cache_length)
        rows = torch.arange(min(cache_length, self.filled))
        self.arranged(rows.expand(self.batch, self.kv_heads, -1), cache_length)


class Counted(AttnWeightsReplayLog):
    """A log with more to it: how many decisions there were."""

    decisions = 0

    def note(self, new, rows):
        super().note(new, rows)
        self.decisions += rows is not None


class Young(AttnWeightsKVCache):
    """The newest outside of the ring go first."""

    update_requires_attn_weights = False

    def _compute_scores(self, rows):
        return -rows.token_pos.float()


def test_the_bare_interface_is_enough_for_a_cache():
    mine, dense = (
        Monolith(),
        make_cache("dense-default", cache_length=30, dtype=torch.float32, **SIZES),
    )
    generator = torch.Generator().manual_seed(1)
    for new in (7, 1, 5):
        given = step(generator, new)
        assert torch.allclose(mine(*given), dense(*given), atol=1e-5)
    assert all(
        torch.equal(*pair) for pair in zip(mine.keys_values(), dense.keys_values(), strict=True)
    )
    with pytest.raises(TypeError):
        KVCache()


def test_rows_may_be_kept_in_ones_own_way():
    mine = InLists()
    ours = make_cache("lastrec-default", cache_length=8, dtype=torch.float32, **SIZES)
    generator = torch.Generator().manual_seed(2)
    for new in (5, 3, 4, 1, 8):
        given = step(generator, new)
        assert torch.allclose(mine(*given), ours(*given), atol=1e-5)
        assert torch.equal(mine.token_pos, ours.token_pos)
    with pytest.raises(ConfigError, match="a step of 9 tokens, at most 8 wanted"):
        mine(*step(generator, 9))


@pytest.mark.parametrize("kind", [Middle, Young])
@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_policy_of_ones_own_goes_with_any_buffers(kind, buffers):
    name = f"{kind.__name__}{buffers}".lower()
    register(name, kind)
    ids = torch.randint(1, 211, (1, 60), generator=torch.Generator().manual_seed(3))
    with SelectiveCache(make(), CacheSettings(f"{name}-{buffers}", 20, 6)) as cache:
        assert cache.read(ids).isfinite().all()
        held = set(cache.caches[0].token_pos[0, 0].tolist())
        assert {0, 59} <= held
        assert len(held) == 20


def test_a_log_may_note_more():
    cache = make_cache("h2o-default", cache_length=8, dtype=torch.float32, **SIZES)
    cache.replay_log = log = Counted()
    generator = torch.Generator().manual_seed(4)
    for new in (5, 3, 2, 1):
        cache(*step(generator, new))
    assert log.decisions == 2
    other = make_cache("random-default", cache_length=8, dtype=torch.float32, **SIZES)
    other.replay(log)
    generator = torch.Generator().manual_seed(4)
    for new in log.steps:
        other(*step(generator, new))
    assert torch.equal(other.token_pos, cache.token_pos)
