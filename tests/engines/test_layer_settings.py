"""Settings of an open LayerwiseEngine act on the caches of its executor, or are refused."""

from types import SimpleNamespace

import pytest
from tinymodels import BLOCK, serve, some

from kvtrie.engines.transformers import KvtrieCache
from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.errors import ConfigError
from kvtrie.transfer import Layerwise, LayerwiseEngine

pytestmark = pytest.mark.engine


def test_settings_that_a_cache_cannot_follow_are_refused(llama):
    ids = some(0, 1, 2 * BLOCK)
    with serve(llama, 22, 100) as executor:
        with LayerwiseEngine(executor, Layerwise(blending=True)), pytest.raises(ConfigError):
            KvtrieCache(llama, executor, ids)
        with pytest.raises(ConfigError):
            KvtrieCache(llama, executor, ids, use_layerwise=Layerwise())
        KvtrieCache(llama, executor, ids).close()


def test_an_open_engine_serves_until_it_is_closed(llama):
    with serve(llama, 22, 100) as executor:
        default = LayerwiseEngine.of(executor)
        with LayerwiseEngine(executor, Layerwise(use_gpu=True, staging_bytes=1 << 20)) as engine:
            assert LayerwiseEngine.of(executor) is engine
        assert LayerwiseEngine.of(executor) is default


@pytest.mark.parametrize(("ahead", "issued"), [(None, [4, 4, 4]), (0, [1, 2, 3]), (1, [2, 3, 4])])
def test_look_ahead_bounds_the_layers_on_their_way(ahead, issued):
    seen = []
    arrival = object.__new__(Arrival)
    arrival._engine = SimpleNamespace(settings=Layerwise(look_ahead=ahead), layers=4)
    arrival._loads = [SimpleNamespace(issue=seen.append)]
    most = []
    for layer in range(3):
        arrival._issue(layer)
        most.append(max(seen))
    assert most == issued
