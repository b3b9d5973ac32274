"""`kvtrie vllm` and `kvtrie sglang`: the command that each builds and becomes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrie.cli import main
from kvtrie.cli.launch import sglang, sizes
from kvtrie.engines.vllm.settings import Settings
from kvtrie.settings.sizes import size

FREE = 64 * 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 GB of free memory."""
    monkeypatch.setattr(sizes, "free_memory", lambda: FREE)
    monkeypatch.setattr(sizes, "all_memory", lambda: 2 * FREE)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def printed(capsys, *words):
    """The words of the command that would start."""
    at = words.index("--") if "--" in words else len(words)
    assert main([*words[:at], "--print", *words[at:]]) == 0
    return shlex.split(capsys.readouterr().out)


def refused(capsys, *words):
    """The last line with which a command is refused."""
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err.splitlines()[-1]


def value(words, flag):
    return words[words.index(flag) + 1]


def extra(words):
    """The settings of the connector in a command of vLLM."""
    config = json.loads(value(words, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("KvtrieConnector", "kv_both")
    return config["kv_connector_extra_config"]


def test_vllm_gets_the_settings_of_the_connector(capsys, tmp_path):
    words = printed(
        capsys, "vllm", "a/model", "--host", "8GB", "--disk", f"{tmp_path}/kv:20MiB", "--policy",
        "lru", "--objective", "hits", "--events", "--", "--port", "8001", "--host", "::1",
    )  # fmt: skip
    assert words[:4] == ["vllm", "serve", "a/model", "--kv-transfer-config"]
    assert words[-4:] == ["--port", "8001", "--host", "::1"]
    events = json.loads(value(words, "--kv-events-config"))
    assert events == {"enable_kv_cache_events": True, "publisher": "zmq"}
    settings = extra(words)
    assert settings == {
        "tiers": [
            {"kind": "host", "bytes": "8GB"},
            {"kind": "disk", "bytes": "20MiB", "path": f"{tmp_path}/kv"},
        ],
        "policy": "lru",
        "objective": "hits",
        "events": True,
    }
    assert not (tmp_path / "kv").exists()
    host, disk = Settings.read(settings).tiers
    assert (host.bytes, disk.bytes) == (8 * 10**9, 20 << 20)


def test_vllm_takes_a_store_a_format_and_any_other_setting(capsys, tmp_path):
    words = printed(
        capsys, "vllm", "m", "--host", "8GB", "--disk", f"{tmp_path}/kv:20MiB",
        "--remote", f"folder:{tmp_path}/shared", "--format", "int8", "--layerwise",
        "--set", "calibration=made.json", "--set", "deadline_s=5", "--set", "native_first=16",
        "--set", "why=false", "--set", "disk.durability=fsync", "--set", "disk.format=int4",
        "--set", "remote.trust_s=2.5", "--set", "remote.workers=4", "--set", "host.admit_after=2",
        "--set", "remote.write_limit=50MB", "--set", "policy=lru",
    )  # fmt: skip
    settings = extra(words)
    assert settings == {
        "tiers": [
            {"kind": "host", "bytes": "8GB", "format": "int8", "admit_after": 2},
            {
                "kind": "disk", "bytes": "20MiB", "path": f"{tmp_path}/kv", "durability": "fsync",
                "format": "int4",
            },
            {
                "kind": "remote", "path": f"folder:{tmp_path}/shared", "trust_s": 2.5,
                "workers": 4, "write_limit": "50MB",
            },
        ],
        "use_layerwise": True,
        "calibration": "made.json",
        "deadline_s": 5.0,
        "native_first": 16,
        "why": False,
        "policy": "lru",
    }  # fmt: skip
    del settings["native_first"]  # needs one format in all tiers
    read = Settings.read(settings)
    assert (read.format, read.disk_format, read.use_layerwise) == ("int8", "int4", True)
    assert read.tiers[2].trust_s == 2.5
    shared = extra(printed(capsys, "vllm", "m", "--remote", "redis://h:1", "--", "-dp", "2"))
    assert shared["tiers"][1] == {"kind": "remote", "path": "redis://h:1"}


def test_sglang_takes_a_store_and_any_other_setting(capsys, tmp_path):
    def storage(*words):
        command = printed(capsys, "sglang", "m", "--host", "9GB", *words)
        found = json.loads(value(command, "--hicache-storage-backend-extra-config"))
        return {name: found[name] for name in found if name not in sglang._STORAGE}

    sets = ("--set", "trust_s=5", "--set", "lookup=local", "--set", "deadline_s=2")
    assert storage("--remote", "redis://h:1/0", "--layerwise", *sets) == {
        "path": "redis://h:1/0",
        "trust_s": 5.0,
        "lookup": "local",
        "deadline_s": 2.0,
    }
    assert storage("--disk", f"{tmp_path}/kv:10MB", "--set", "durability=none") == {
        "path": f"{tmp_path}/kv",
        "bytes": "10MB",
        "durability": "none",
    }
    kept = storage(
        "--set", f"keep={tmp_path}/kv", "--set", "bytes=1GB", "--set", "keep_replace=true"
    )
    assert kept == {"keep": f"{tmp_path}/kv", "bytes": "1GB", "keep_replace": True}
    words = printed(capsys, "sglang", "m", "--set", "policy=lru", "--objective", "hits")
    assert json.loads(value(words, "--radix-eviction-policy-config")) == {
        "policy": "lru",
        "objective": "hits",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vllm m --set x=1", "--set has no 'x': policy, objective, use_layerwise, deadline_s,"),
        ("vllm m --set tiers=[]", "--set has no 'tiers'"),
        ("vllm m --set host.kind=disk", "--set has no 'host.kind'"),
        ("vllm m --set deadline_s", "--set takes NAME=VALUE, not 'deadline_s'"),
        ("vllm m --set =1", "--set takes NAME=VALUE"),
        ("vllm m --set deadline_s=soon", "--set deadline_s is 'soon', a number wanted"),
        ("vllm m --set native_first=1.5", "--set native_first is '1.5', a number wanted"),
        ("vllm m --set why=yes", "--set why is 'yes', true or false wanted"),
        ("vllm m --set objective=all", "--set objective is 'all', cost or balanced or hits wanted"),
        ("vllm m --set why=true --set why=false", "--set why is given twice"),
        ("vllm m --policy lru --set policy=fifo", "another option gives policy"),
        ("vllm m --set host.bytes=1GB", "another option gives bytes"),
        ("vllm m --set disk.io=buffered", "there is no disk tier: --disk makes it"),
        ("vllm m --remote kv", "a URL wanted: 'folder:kv' is a folder"),
        ("vllm m --format int9", "invalid choice: 'int9'"),
        ("sglang m --format int8", "keeps pages as SGLang has them"),
        ("sglang m --layerwise", "the radix cache loads nothing"),
        (
            "sglang m --disk kv:1GB --remote redis://h",
            "--disk and --remote: the hierarchical cache",
        ),
        ("sglang m --disk kv:1GB --set keep=/x", "--disk and --set keep: the hierarchical cache"),
        ("sglang m --set durability=none", "--set has no 'durability': policy, objective"),
        ("sglang m --disk kv:1GB --set bytes=1", "--set has no 'bytes'"),
        ("sglang m --remote redis://h --set trust_s=x", "--set trust_s is 'x', a number wanted"),
        ("sglang m --policy lru --set policy=lru", "--set policy and --policy"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(capsys, words, message):
    assert message in refused(capsys, *words.split())


def test_without_a_host_a_quarter_of_the_free_memory_is_taken(capsys):
    assert extra(printed(capsys, "vllm", "m"))["tiers"] == [{"kind": "host", "bytes": FREE // 4}]


def test_a_share_is_taken_once_for_all_processes(capsys):
    settings = extra(printed(capsys, "vllm", "m", "--host", "50%"))
    assert settings["tiers"] == [{"kind": "host", "bytes": FREE // 2}]


@pytest.mark.parametrize("flag", ["--data-parallel-size=4", "-dp 4", "--data_parallel_size 4"])
def test_data_parallel_servers_share_the_host_memory(capsys, flag):
    settings = extra(printed(capsys, "vllm", "m", "--host", "8GB", "--", *flag.split()))
    assert settings["tiers"] == [{"kind": "host", "bytes": 2 * 10**9}]
    assert "4 data-parallel servers" in refused(
        capsys, "sglang", "m", "--disk", "kv:2GB", "--", "--dp-size", "4"
    )


@pytest.mark.parametrize(
    ("flags", "servers"),
    [
        ("-dp 4", 4),
        ("--data-parallel-size 4 --data-parallel-size-local 2", 2),
        ("-dp 8 -dpl=2", 2),
        ("-dp 4 --data-parallel-rank 3", 1),
        ("-dp 4 -dpn 0", 1),
    ],
)
def test_data_parallel_servers_of_a_machine_divide_memory_and_disk(
    capsys, tmp_path, flags, servers
):
    words = ["vllm", "m", "--host", "8MB", "--disk", f"{tmp_path}:4MB", "--keep", "memory/kv"]
    host, disk = extra(printed(capsys, *words, "--", *flags.split()))["tiers"]
    assert size("host", host["bytes"]) == 8 * 10**6 // servers
    assert size("disk", disk["bytes"]) == 4 * 10**6 // servers
    assert disk["path"] == str(tmp_path)  # each rank takes its part of it
    assert host["keep"] == str(Path("memory/kv").absolute())


def test_a_relative_folder_is_that_of_the_working_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = extra(printed(capsys, "vllm", "m", "--disk", "kv:2MB"))
    assert settings["tiers"][1]["path"] == str(tmp_path / "kv")


def test_a_server_without_plugins_gets_the_module(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    config = json.loads(value(printed(capsys, "vllm", "m"), "--kv-transfer-config"))
    assert config["kv_connector_module_path"] == "kvtrie.engines.vllm"


def test_sglang_gets_the_radix_cache(capsys):
    words = printed(capsys, "sglang", "m", "--policy", "lru", "--events", "--", "--tp", "2")
    assert words[:6] == ["sglang", "serve", "--model-path", "m", "--radix-cache-backend", "kvtrie"]
    assert json.loads(value(words, "--radix-eviction-policy-config")) == {"policy": "lru"}
    assert json.loads(value(words, "--kv-events-config")) == {"publisher": "zmq"}
    assert words[-2:] == ["--tp", "2"]


def test_sglang_with_a_disk_gets_the_hierarchical_cache(capsys, tmp_path):
    disk = f"{tmp_path}/kv:10MB"
    words = printed(capsys, "sglang", "m", "--host", "9GB", "--disk", disk, "--", "--tp-size", "2")
    assert "--enable-hierarchical-cache" in words
    assert "--radix-cache-backend" not in words
    assert value(words, "--hicache-size") == "4"  # whole gigabytes of each of the two ranks
    assert value(words, "--hicache-storage-backend") == "dynamic"
    settings = json.loads(value(words, "--hicache-storage-backend-extra-config"))
    assert (settings["path"], settings["bytes"]) == (f"{tmp_path}/kv", "10MB")
    assert (settings["backend_name"], settings["class_name"]) == ("kvtrie", "KvtrieHiCache")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vllm m -- --kv-transfer-config {}", "kvtrie sets --kv-transfer-config"),
        ("vllm m -- --kv_transfer_config={}", "kvtrie sets --kv-transfer-config"),
        ("vllm m -- --kv-transfer {}", "kvtrie sets --kv-transfer-config"),
        ("vllm m -- --kv-transfer-config.kv_role x", "kvtrie sets --kv-transfer-config"),
        ("vllm m -- --kv-offloading-size 4", "kvtrie sets --kv-offloading-size"),
        ("vllm m -- --model n", "kvtrie sets --model"),
        ("vllm m --host 1GB --host 2GB", "--host is given twice"),
        ("vllm m --port 80", "unknown arguments: --port 80; arguments of `vllm serve` follow"),
        ("vllm", "required: MODEL"),
        ("vllm m --host 0.0.0.0", "the address that the engine binds to follows"),
        ("vllm m --host 8G", "the units are B, KB"),
        ("vllm m --host 900GB", "this machine or its control group has 128000000000"),
        ("vllm m --host 0%", "more than 0% to 100% wanted"),
        ("vllm m --disk /kv", "PATH:SIZE wanted, as /kv:200GB"),
        ("vllm m --disk /kv:", "PATH:SIZE wanted"),
        ("vllm m --disk :2GB", "PATH:SIZE wanted"),
        ("vllm m --disk s3://b:2GB", "s3:// is not supported"),
        ("vllm m --disk kv:9EB", "the file system of"),
        ("vllm m --policy x", "--policy is one of"),
        ("vllm m --objective x", "invalid choice: 'x'"),
        ("sglang m --host 2GB", "--host is 2GB without --disk"),
        ("sglang m --disk kv:2MB --policy lru", "--policy and --disk"),
        ("sglang m --disk kv:2MB --host 2GB -- --tp 4", "at least 4GB wanted"),
        ("sglang m -- --radix-cache-backend x", "kvtrie sets --radix-cache-backend"),
        ("sglang m -- --hicache-ratio 2", "kvtrie sets --hicache-ratio"),
        ("sglang m -- --model-path n", "kvtrie sets --model-path"),
    ],
)
def test_wrong_words_are_refused_in_one_line(capsys, words, message):
    assert message in refused(capsys, *words.split())


def test_an_option_of_the_engine_that_begins_like_ours_is_not_refused(capsys):
    words = printed(capsys, "sglang", "m", "--", "--radix-eviction-policy", "lru")
    assert words[-2:] == ["--radix-eviction-policy", "lru"]


def test_a_flag_in_a_configuration_file_is_refused(capsys, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("port: 8000\nkv_transfer_config: '{}'\n")
    err = refused(capsys, "vllm", "m", "--", "--config", str(file))
    assert f"{file} has kv_transfer_config, and kvtrie sets --kv-transfer-config" in err
    file.write_text("port: 8000\n")
    assert printed(capsys, "vllm", "m", "--", "--config", str(file))[-1] == str(file)


def test_events_that_the_caller_configures_are_not_configured_again(capsys):
    words = printed(capsys, "vllm", "m", "--events", "--", "--kv-events-config", "{}")
    assert words.count("--kv-events-config") == 1
    assert extra(words)["events"]


FAKE = """#!{python}
import os, signal, sys
os.write(1, "\\n".join([str(os.getpid()), *sys.argv[1:], ""]).encode())  # at once
signal.pause()
"""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_becomes_the_engine_with_the_same_process_id(tmp_path, engine):
    fake = tmp_path / engine
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    child = subprocess.Popen(
        [sys.executable, "-m", "kvtrie", engine, "a model", "--", "--port", "80"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    with child:
        assert int(child.stdout.readline()) == child.pid
        assert child.stdout.readline() == "serve\n"
        child.send_signal(signal.SIGTERM)
        words = child.stdout.read().splitlines()
    assert "a model" in words
    assert words[-2:] == ["--port", "80"]
    assert child.returncode == -signal.SIGTERM


def test_an_engine_that_is_not_installed_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no vllm next to" in refused(capsys, "vllm", "m")


def test_keep_names_the_file_of_host_memory(capsys, tmp_path):
    words = printed(capsys, "vllm", "m", "--host", "8GB", "--keep", f"{tmp_path}/pool")
    rows = extra(words)["tiers"]
    assert rows == [{"kind": "host", "bytes": "8GB", "keep": f"{tmp_path}/pool"}]
    (host,) = Settings.read({"tiers": rows}).tiers
    assert (host.keep, host.keep_replace) == (f"{tmp_path}/pool", False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--keep", "memory/kv"], "--keep with --host 25%: a share of the free memory differs"),
        (["--host", "10%", "--keep", "memory/kv"], "--keep with --host 10%"),
    ],
)
def test_keep_needs_a_size(capsys, words, why):
    assert why in refused(capsys, "vllm", "m", *words)


def test_sglang_has_no_file_of_host_memory(capsys):
    assert "unknown arguments: --keep" in refused(capsys, "sglang", "m", "--keep", "memory/kv")


def test_a_control_socket_is_a_setting_and_each_rank_has_one(capsys):
    words = printed(capsys, "vllm", "a/model", "--control", "/run/kv.sock")
    assert extra(words)["control"] == "/run/kv.sock"
    two = ("--", "--data-parallel-size", "2")
    words = printed(capsys, "vllm", "a/model", "--control", "/run/kv.sock", *two)
    assert extra(words)["control"] == "/run/kv-{rank}.sock"
    assert Settings.read({"control": extra(words)["control"]}).control == "/run/kv-{rank}.sock"
    assert "at most 100 wanted" in refused(capsys, "vllm", "m", "--control", "/" + "x" * 120)
    assert "no control socket" in refused(capsys, "sglang", "m", "--control", "/run/kv.sock")
