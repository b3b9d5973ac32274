"""Settings of the vLLM connector: defaults, sizes, and values that are refused."""

import pytest

from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError


def test_settings_that_are_not_given_have_their_defaults():
    settings = Settings.read(None)
    assert settings == Settings()
    assert (settings.tiers, settings.use_layerwise, settings.events) == (None, False, False)
    assert Settings.read({"use_layerwise": True, "deadline_s": 2}).deadline_s == 2.0


def test_layerwise_is_another_name_of_use_layerwise():
    for name in ("layerwise", "use_layerwise"):
        assert Settings.read({name: True}) == Settings(use_layerwise=True)
    with pytest.raises(ConfigError, match="give one of them"):
        Settings.read({"layerwise": True, "use_layerwise": True})


def test_tiers_are_read_with_sizes_as_json_writes_them(tmp_path):
    rows = [
        {"kind": "host", "bytes": 8e9},
        {"kind": "disk", "bytes": 2e11, "path": str(tmp_path / "kv")},
    ]
    host, disk = Settings.read({"tiers": rows}).tiers
    assert (host.bytes, disk.bytes) == (8_000_000_000, 200_000_000_000)
    assert (host.write, disk.path) == ("through", str(tmp_path / "kv"))
    assert (tmp_path / "kv").is_dir()


def test_ranks_divide_the_sizes_of_a_server(tmp_path, monkeypatch):
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
    rows = [{"kind": "host", "bytes": "8GB"}, {"kind": "disk", "bytes": "1GiB", "path": "~/kv"}]
    tiers = Settings.read({"tiers": rows}, ranks=4).tiers
    assert [tier.bytes for tier in tiers] == [2 * 10**9, 1 << 28]
    with pytest.raises(ConfigError, match="bytes of tier 0 is 3, 4 to"):
        Settings.read({"tiers": [{"kind": "host", "bytes": 3}]}, ranks=4)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (
            {"tier": []},
            "has no 'tier': tiers, policy, objective, use_layerwise, deadline_s, events",
        ),
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
        (
            {"tiers": [{"kind": "host", "bytes": "25%", "keep": "memory/kv"}]},
            "bytes of tier 'host' is '25%' with keep: a share of the free memory differs",
        ),
        (
            {"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2, "keep": "a"}]},
            "keep is 'a', for a tier of kind 'host'",
        ),
        ({"tiers": [{"kind": "host", "blocks": 2, "owner": "none"}]}, "tier 0 has no 'owner'"),
        ({"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2}]}, "needs a path"),
        (
            {"tiers": [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2, "path": None}]},
            "needs a path",
        ),
        ({"policy": "best"}, "best"),
        ({"layerwise": 1}, "use_layerwise"),
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
