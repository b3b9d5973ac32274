"""Settings of the vLLM connector: defaults, sizes, and values that are refused."""

from types import SimpleNamespace

import pytest

from kvtrie.engines.vllm.data_parallel import part_of
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS


def test_settings_that_are_not_given_have_their_defaults():
    settings = Settings.read(None)
    assert settings == Settings()
    assert (settings.tiers, settings.use_layerwise, settings.events) == (None, False, False)
    assert Settings.read({"use_layerwise": True, "deadline_s": 2}).deadline_s == 2.0


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
            "has no 'tier': tiers, policy, objective, use_layerwise, deadline_s, lookup_s, events",
        ),
        ({"tiers": []}, "a list of at least one tier wanted"),
        ({"share_after": 1}, "share_after is 1, 2 to 32"),
        ({"share_after": 3}, "share_after is 3 without secret_file"),
        ({"secret_file": "s"}, "secret_file is given without share_after"),
        ({"share_after": 3, "secret_file": "/none"}, "secret_file /none"),
        ({"tenant_header": "X-Account"}, "tenant_header is 'X-Account' without share_after"),
        ({"tenant_header": ""}, "tenant_header is empty"),
        ({"tiers": [7]}, "tier 0 is 7, an object wanted"),
        ({"tiers": [{"kind": "gpu", "bytes": 1}]}, "host"),
        ({"tiers": [{"kind": "disk", "bytes": 1, "path": "kv"}]}, r"\['host', 'disk'\], .* wanted"),
        ({"tiers": [{"kind": "host", "blocks": 2}] * 2}, r"\['host', 'disk'\], .* wanted"),
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
        ({"use_layerwise": 1}, "use_layerwise"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"keep_versions": 0}, "keep_versions is 0, 1 to 1000 wanted"),
        ({"keep_versions": "2"}, "keep_versions is '2'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_reason(extra, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        Settings.read(extra)


HOST = {"kind": "host", "blocks": 2}
STORE = {"kind": "remote", "path": "folder:/kv"}


def test_a_remote_tier_is_read_with_its_defaults(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    more = {"workers": 8, "write_limit": "64MiB", "trust_s": 5, "lookup": "local"}
    row = STORE | more | {"secret_file": str(secret)}
    settings = Settings.read({"tiers": [HOST, row], "lookup_s": 0.2}, ranks=2)
    remote = settings.tiers[-1]
    assert (remote.blocks, remote.path, remote.workers) == (10_000_000, "folder:/kv", 8)
    assert (remote.write_limit, remote.trust_s, remote.lookup) == (32 << 20, 5.0, "local")
    assert (settings.lookup_s, Settings().lookup_s) == (0.2, 0.05)
    assert settings.tiers[0].write == "through"
    disk = {"kind": "disk", "blocks": 2, "path": str(tmp_path / "kv")}
    tiers = Settings.read({"tiers": [HOST, disk, STORE | {"blocks": 7}]}).tiers
    assert [(tier.kind, tier.write) for tier in tiers[:2]] == [
        ("host", "through"),
        ("disk", "through"),
    ]
    assert tiers[2].blocks == 7


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([STORE], r"tiers are \['remote'\]"),
        ([HOST, STORE, STORE], r"tiers are \['host', 'remote', 'remote'\]"),
        ([HOST, {"kind": "remote"}], "a remote tier needs a path, the URL of its store"),
        ([HOST, STORE | {"path": "/kv"}], "'folder:/kv' is a folder"),
        ([HOST, STORE | {"path": "redis://h:port/0"}], "path of tier 'remote'"),
        ([HOST, STORE | {"bytes": "25%"}], "bytes of tier 1"),
        ([HOST | {"trust_s": 1}, STORE], "trust_s is given of tier 'host': only a remote tier"),
        ([HOST | {"workers": 1}, STORE], "workers is given of tier 'host'"),
        ([HOST, STORE | {"workers": 0}], "workers of tier 'remote' is 0"),
        ([HOST, STORE | {"write_limit": 0}], "write_limit of tier 1 is 0"),
        ([HOST, STORE | {"trust_s": 0}], "trust_s of tier 'remote' is 0"),
        ([HOST, STORE | {"trust_s": float("inf")}], "trust_s of tier 'remote' is inf"),
        ([HOST, STORE | {"lookup": "some"}], "lookup of tier 'remote'"),
        ([HOST, STORE | {"secret_file": "/none"}], "secret_file /none"),
        ([HOST, STORE | {"secret_file": "empty"}], "secret_file .*empty is empty"),
    ],
)
def test_a_wrong_remote_tier_is_refused_with_its_reason(rows, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=why):
        Settings.read({"tiers": rows})


@pytest.mark.parametrize(
    ("engine", "parallel", "part"),
    [
        ("a", (1, 0), ""),
        ("a_dp0", (1, 0), "dp-0"),  # the first of several engines of a dense model
        ("a_dp11", (1, 11), "dp-11"),
        ("a_dp0_b", (1, 0), ""),
        (None, (2, 1), "dp-1"),  # offline
    ],
)
def test_each_data_parallel_rank_has_a_part_of_the_disk(tmp_path, engine, parallel, part):
    parallel = SimpleNamespace(data_parallel_size=parallel[0], data_parallel_index=parallel[1])
    assert part_of(engine, parallel) == part
    rows = [
        {"kind": "host", "bytes": "1MB", "keep": "/dev/shm/kv"},  # noqa: S108
        {"kind": "disk", "bytes": "8MB", "path": str(tmp_path)},
        {"kind": "remote", "path": f"folder:{tmp_path}/shared"},
    ]
    host, disk, remote = Settings.read({"tiers": rows}, ranks=2, part=part).tiers
    assert disk.path == (f"{tmp_path}/{part}" if part else str(tmp_path))
    assert host.keep == (f"/dev/shm/kv-{part}" if part else "/dev/shm/kv")  # noqa: S108
    assert remote.path == f"folder:{tmp_path}/shared"
    assert disk.bytes == 4 * 10**6


@pytest.mark.parametrize("name", ["deadline_s", "lookup_s"])
@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_number_of_seconds_out_of_range_is_refused(name, number):
    with pytest.raises(ConfigError, match=name):
        Settings.read({name: number})


def test_a_password_is_in_no_text_of_the_settings():
    rows = [HOST, STORE | {"path": "redis://user:hidden@host/0"}]
    assert "hidden" not in repr(Settings.read({"tiers": rows}))
    with pytest.raises(ConfigError, match="twice") as caught:
        Settings.read({"tiers": [HOST, STORE | {"path": "redis://u:hidden@h?ttl=1&ttl=2"}]})
    assert "hidden" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    rows = [{"kind": "host", "blocks": 2}, {"kind": "disk", "blocks": 2}]
    rows[1]["path"] = str(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match="cannot be written"):
        Settings.read({"tiers": rows})


def test_the_format_of_host_memory_is_that_of_the_tiers_below_it(tmp_path):
    disk = {"kind": "disk", "bytes": 10**9, "path": str(tmp_path / "kv")}
    for below in ({}, {"format": "int8"}):
        rows = [{"kind": "host", "bytes": 10**9, "format": "int8"}, disk | below]
        limits = {"max_kl": 1, "native_first": 64, "native_last": 128}
        settings = Settings.read({"tiers": rows, **limits})
        assert settings.format == settings.disk_format == "int8"
        assert [tier.layout for tier in settings.tiers] == [FORMATS["int8"]] * 2
        assert (settings.max_kl, settings.native_last, settings.uncalibrated) == (1.0, 128, False)
        assert settings.native_first == 64
    plain = Settings.read({"tiers": [{"kind": "host", "bytes": 1, "format": "native"}, disk]})
    assert (plain.format, plain.max_kl, plain.native_last) == ("native", 1e-3, 0)
    assert [tier.layout for tier in plain.tiers] == [None, None]


@pytest.mark.parametrize(("host", "disk"), [("native", "int8"), ("int8", "int4")])
def test_a_disk_may_have_a_format_of_fewer_bits(host, disk, tmp_path):
    rows = [
        {"kind": "host", "bytes": 10**9, "format": host},
        {"kind": "disk", "bytes": 10**9, "path": str(tmp_path / "kv"), "format": disk},
    ]
    settings = Settings.read({"tiers": rows})
    assert (settings.format, settings.disk_format) == (host, disk)
    assert [tier.layout for tier in settings.tiers] == [FORMATS[host], FORMATS[disk]]
    rows.append({"kind": "remote", "path": "redis://localhost:1/0", "format": disk})
    with pytest.raises(ConfigError, match=f": {host} wanted; .* other tiers use that of tier 0"):
        Settings.read({"tiers": rows})


@pytest.mark.parametrize(
    ("host", "disk", "more", "why"),
    [
        ("int5", None, {}, "format of tier 0 is one of native, int8, fp8, int4, not 'int5'"),
        ("int8", "native", {}, "is 'native' and that of tier 0 'int8': int8, int4 wanted"),
        ("int8", "fp8", {}, "a disk may use the format of host memory or fewer bits"),
        ("int4", "int8", {}, "that of tier 0 'int4': int4 wanted"),
        ("int8", None, {"max_kl": -1}, "max_kl is -1"),
        ("int8", None, {"native_last": 1.5}, "native_last"),
        ("int8", None, {"native_first": -1}, "native_first is -1"),
        ("native", None, {"native_first": 64}, "native_first is 64 and no tier has a format"),
        ("int8", "int4", {"native_first": 64}, "memory is 'int8' and that of the disk 'int4'"),
        ("native", "int8", {"native_first": 64}, "memory is 'native' and that of the disk 'int8'"),
        ("int8", None, {"native_first": 64, "events": True}, "native_first is 64 and events is"),
        ("int8", None, {"uncalibrated": "yes"}, "uncalibrated is 'yes'"),
        ("int8", None, {"calibration": 7}, "calibration"),
    ],
)
def test_a_format_that_cannot_be_is_refused(host, disk, more, why, tmp_path):
    rows = [
        {"kind": "host", "bytes": 10**9, "format": host},
        {"kind": "disk", "bytes": 10**9, "path": str(tmp_path / "kv")},
    ]
    if disk is not None:
        rows[1]["format"] = disk
    with pytest.raises(ConfigError, match=why):
        Settings.read({"tiers": rows} | more)
