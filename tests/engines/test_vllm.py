"""The vLLM connector where vLLM is not: its plug-in, its settings, and what it refuses.

`make test-engines` tests it inside vLLM.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kvtrie.engines.request_hints import RetainedRange
from kvtrie.engines.vllm.hints import range_hints
from kvtrie.engines.vllm.model import ServedModel, window_cost
from kvtrie.engines.vllm.running import GrowingTokens
from kvtrie.engines.vllm.scope import scope_of
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError
from kvtrie.scope import Scope

ROOT = Path(__file__).parents[2]
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.mark.parametrize(
    ("group", "engine"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]
)
def test_an_entry_point_loads_nothing_heavy(group, engine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][group]
    assert points == {"kvtrie": f"kvtrie.engines.{engine}.plugin:register"}
    code = f"import sys, kvtrie.engines.{engine}.plugin; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "vllm", "sglang", "transformers"}
    assert not heavy & {name.partition(".")[0] for name in out.stdout.split()}


def test_registering_twice_is_registering_once(monkeypatch):
    from kvtrie.engines.vllm.plugin import register

    declared = {}

    def enter(name, path, kind):
        if (name, kind) in declared:
            raise ValueError(f"'{name}' is already registered.")
        declared[name, kind] = path

    def there(path, **tables):
        for name in [path.rsplit(".", at)[0] for at in range(1, path.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for table, method in tables.items():
            setattr(sys.modules[path], table, SimpleNamespace(**{method: enter}))

    there(FACTORY, KVConnectorFactory="register_connector")
    register()  # a vLLM that has no other table
    register()
    assert declared == {
        ("KvtrieConnector", "KvtrieConnector"): "kvtrie.engines.vllm.connector",
    }
    there("vllm.v1.kv_offload.cpu.policies.factory", CachePolicyFactory="register_cache_policy")
    register()
    assert declared["kvtrie", "KvtrieCachePolicy"] == "kvtrie.engines.vllm.cache_policy"


def test_settings_that_are_not_given_have_their_defaults():
    settings = Settings.read(None)
    assert settings == Settings()
    assert (settings.tiers, settings.layerwise, settings.events) == (None, False, False)
    assert Settings.read({"layerwise": True, "deadline_s": 2}).deadline_s == 2.0


def test_tiers_are_read_with_sizes_as_json_writes_them(tmp_path):
    rows = [
        {"kind": "host", "bytes": 8e9},
        {"kind": "disk", "bytes": 2e11, "path": str(tmp_path / "kv")},
    ]
    host, disk = Settings.read({"tiers": rows}).tiers
    assert (host.bytes, disk.bytes) == (8_000_000_000, 200_000_000_000)
    assert (host.write, disk.path) == ("through", str(tmp_path / "kv"))
    assert (tmp_path / "kv").is_dir()


def test_sizes_with_units_and_shares_that_the_ranks_of_a_machine_have_together(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [{"kind": "host", "bytes": "8GB"}, {"kind": "disk", "bytes": "1GiB", "path": "~/kv"}]
    host, disk = Settings.read({"tiers": rows}).tiers
    assert (host.bytes, disk.bytes) == (8 * 10**9, 1 << 30)
    assert disk.path == str(tmp_path / "kv")
    monkeypatch.setattr("kvtrie.engines.vllm.settings.free_memory", lambda: 1000)
    monkeypatch.setattr("kvtrie.engines.vllm.settings.free_disk", lambda _: 5000)
    rows = [{"kind": "host", "bytes": "25%"}, {"kind": "disk", "bytes": "50%", "path": "~/kv"}]
    tiers = Settings.read({"tiers": rows}, ranks=2).tiers
    assert [tier.bytes for tier in tiers] == [125, 1250]


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"tier": []}, "has no 'tier': tiers, policy, objective, layerwise, deadline_s, events"),
        ({"tiers": []}, "a list of at least one tier wanted"),
        ({"tiers": [7]}, "tier 0 is 7, an object wanted"),
        ({"tiers": [{"kind": "remote", "bytes": 1}]}, "'remote' has no back end yet"),
        ({"tiers": [{"kind": "gpu", "bytes": 1}]}, "host"),
        ({"tiers": [{"kind": "disk", "bytes": 1, "path": "kv"}]}, r"\['host', 'disk'\] wanted"),
        ({"tiers": [{"kind": "host", "blocks": 2}] * 2}, r"\['host', 'disk'\] wanted"),
        ({"tiers": [{"kind": "host", "bytes": 8.5}]}, "bytes of tier 0 is 8.5, a whole number"),
        ({"tiers": [{"kind": "host", "bytes": "8G"}]}, "bytes of tier 0 is '8G', .* units are"),
        (
            {"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "path": "s3://kv"}]},
            "path of tier 1 is 's3://kv': s3:// is not supported",
        ),
        ({"tiers": [{"kind": "host"}]}, "needs room as blocks or as bytes"),
        ({"tiers": [{"kind": "host", "blocks": 2, "owner": "none"}]}, "tier 0 has no 'owner'"),
        ({"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2}]}, "needs a path"),
        (
            {"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2, "path": None}]},
            "needs a path",
        ),
        ({"policy": "best"}, "best"),
        ({"layerwise": 1}, "layerwise"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_reason(extra, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        Settings.read(extra)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    rows = [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2}]
    rows[1]["path"] = str(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match="cannot be written"):
        Settings.read({"tiers": rows})


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def served(spec=FullAttentionSpec, *, groups=1, pp=1, ranks=None, caching=True, **more):
    page = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "torch.bfloat16",
        "page_size_bytes": 32 * 2 * 2 * 64 * 2,
    } | more
    group = SimpleNamespace(kv_cache_spec=spec(**page), layer_names=["a", "b", "c"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=pp, **(ranks or {})
        ),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=256)),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    caches = SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=100)
    return ServedModel.of(config, caches, name_weights=False)


def test_the_shape_is_that_of_vllms_pages():
    model = served()
    assert model.layer_names == ("a", "b", "c")
    assert (model.shape.kv_heads, model.shape.rank_heads, model.shape.hidden) == (4, 2, 256)
    assert model.shape.layer_bytes(model.block_tokens) == 32 * 2 * 2 * 64 * 2
    # A page with scales in addition to numbers is counted in bytes.
    odd = served(dtype="torch.uint8", page_size_bytes=32 * 300)
    assert odd.shape.layer_bytes(32) == 32 * 300


def test_pipeline_stages_and_latent_kv():
    model = served(pp=3)
    assert (model.stages, model.ranks, model.alike, model.shape.layers) == (3, 6, False, 3)
    latent = served(MLAAttentionSpec, num_kv_heads=1, head_size=96, page_size_bytes=32 * 96 * 2)
    assert (latent.alike, latent.shape.latent, latent.ranks) == (True, True, 2)
    # Pages of bytes are addressed like latent ones, and differ from rank to rank.
    assert not served(dtype="torch.uint8", page_size_bytes=32 * 300).alike


def test_the_cost_of_windows_is_logged():
    def cost(**more):
        return window_cost(
            SimpleNamespace(hf_text_config=SimpleNamespace(**more), max_model_len=1000)
        )

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text = cost(layer_types=kinds, sliding_window=100)
    assert text.startswith("3 of 4 layers attend to 100 tokens at most")
    assert text.endswith("a request of 1000 tokens takes 3.1 times the memory")  # 4000 / 1300
    kinds[0] = "chunked_attention"
    text = cost(layer_types=kinds, sliding_window=100, attention_chunk_size=300)
    assert "3 of 4 layers attend to 300 tokens at most" in text
    assert not cost()
    assert not cost(layer_types=None)
    assert not cost(layer_types=kinds, sliding_window=None, attention_chunk_size=1000)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match=r"in 1 groups \(MambaSpec\)"):
        served(MambaSpec)
    with pytest.raises(ConfigError, match="in 2 groups"):
        served(groups=2)
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        served(ranks={"decode_context_parallel_size": 2})
    with pytest.raises(ConfigError, match="prefix caching is off"):
        served(caching=False)


def request(**more):
    config = {
        "prompt_embeds": None,
        "mm_features": [],
        "cache_salt": None,
    }
    return SimpleNamespace(**(config | more))


def test_salt_identity_and_images_part_requests():
    def image(at, name):
        return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at))

    scopes = [
        scope_of(request(), ""),
        scope_of(request(cache_salt="s"), ""),
        scope_of(request(), "other weights or an adapter"),
        scope_of(request(mm_features=[image(3, "x")]), ""),
        scope_of(request(mm_features=[image(3, "y")]), ""),
        scope_of(request(mm_features=[image(4, "x")]), ""),
        scope_of(request(mm_features=[image(3, "x"), image(3, "y")]), ""),
    ]
    assert scopes[0] == Scope()
    assert len(set(scopes)) == len(scopes)
    assert scope_of(request(prompt_embeds=object()), "") is None
    assert scope_of(request(), None) is None


def test_tokens_grow_in_place_and_the_last_one_sampled_is_not_written():
    class Growing:
        def __init__(self):
            self.all_token_ids = [1, 2, 3]
            self.num_prompt_tokens = 3

        @property
        def num_tokens(self):
            return len(self.all_token_ids)

    growing = Growing()
    tokens = GrowingTokens(growing)
    assert tokens.read().tolist() == [1, 2, 3]
    assert tokens.surely_written() == 3
    for at in range(200):
        growing.all_token_ids.append(at)
        assert tokens.read().tolist() == growing.all_token_ids
        assert tokens.read().dtype == np.uint32
    assert tokens.surely_written() == 202
    del growing.all_token_ids[5:]
    assert tokens.read().tolist() == growing.all_token_ids


def test_ranges_to_retain_become_hints():
    tokens = np.arange(64, dtype=np.uint32)
    (hint,) = range_hints([RetainedRange(0, 32, 80, 60_000_000_000)], tokens, Scope(), "chat")
    assert (hint.priority, hint.end, hint.ttl, hint.owner) == (80, 32, 60_000_000_000, "chat")
