"""`kvtrie doctor`: one line per property of the machine, and a command for what is wrong."""

from __future__ import annotations

import json
import platform

import pytest

import kvtrie
from kvtrie.cli import control, doctor, doctor_disk, doctor_memory, main
from kvtrie.cli.doctor import checks
from kvtrie.cli.doctor_check import Check
from kvtrie.errors import ConfigError
from kvtrie.settings.tier import Tier
from kvtrie.tiers.remote.folder import FolderStore
from kvtrie.tiers.remote.protocol import Result

GB = 10**9


@pytest.fixture
def machine(monkeypatch):
    """Sets what the checks find; by default a sound machine with a GPU."""

    def set_machine(**found):
        values = {
            "free_memory": 40 * GB, "all_memory": 64 * GB, "locked_limit": None,
            "nvidia_driver": "570.86", "all_disk": 32 * GB, "free_disk": 500 * GB,
            "file_system": "ext4", "direct_io": "", "io_uring": "", "clock_source": "tsc",
            "cpu_features": frozenset({"sse2", "avx2"}),
        } | found  # fmt: skip
        versions = {"torch": "2.13.0", "vllm": "0.32.1+cpu"} | values.pop("versions", {})
        monkeypatch.setattr(doctor, "_version", versions.get)
        for name, value in values.items():
            for module in (doctor, doctor_disk, doctor_memory):
                if name in vars(module):
                    monkeypatch.setattr(module, name, answers(value))

    return set_machine


def answers(value):
    def answer(*_):
        if isinstance(value, Exception):
            raise value
        return value

    return answer


def found(tmp_path, engine="vllm"):
    return {check.name: check for check in checks(engine, tmp_path)}


def test_a_sound_machine_has_no_warning_and_exit_status_0(machine, tmp_path, capsys):
    machine()
    assert {check.state for check in found(tmp_path).values()} == {"ok"}
    assert main(["doctor", "--disk", str(tmp_path), "--engine", "vllm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert f"kvtrie         {kvtrie.__version__} (core " in lines[0]
    assert f"Python         {platform.python_version()}" in lines[1]
    assert "vllm           0.32.1+cpu, tested" in lines[3]
    assert not any("fix:" in line for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "name", "state", "message", "fix"),
    [
        ({"versions": {"vllm": None}}, "vllm", "error", "not installed", "vllm==0.32.*"),
        ({"versions": {"vllm": "0.29.9"}}, "vllm", "error", "unsupported", "vllm==0.32.*"),
        ({"versions": {"vllm": "0.31.0"}}, "vllm", "ok", "0.31.0, supported", ""),
        ({"versions": {"vllm": "0.33.0rc1"}}, "vllm", "ok", "0.33.0rc1, supported", ""),
        ({"versions": {"vllm": "0.40.0"}}, "vllm", "warning", "newer than 0.33", "0.32"),
        ({"versions": {"transformers": "5.19.0"}}, "transformers", "ok", "5.23, in an env", ""),
        ({"versions": {"transformers": "5.20.0"}}, "transformers", "warning", "5.20", "<5.20"),
        (
            {"versions": {"transformers": "5.22.1", "vllm": "0.33.0"}},
            "transformers", "warning", "vLLM 0.33.0 takes versions below 5.21", "<5.21",
        ),
        (
            {"versions": {"transformers": "5.23.1", "vllm": "0.30.0"}},
            "transformers", "ok", "5.23.1", "",
        ),
        ({"versions": {"torch": None}}, "torch", "warning", "not installed", "kvtrie[hf]"),
        ({"versions": {"torch": "2.9.1"}}, "torch", "warning", "2.10 wanted", "torch>=2.10"),
        ({"nvidia_driver": ""}, "NVIDIA driver", "ok", "uses the CPU", ""),
        ({"free_memory": GB // 2}, "free memory", "error", "0.5 GB of 64.0 GB", "--memory"),
        ({"free_memory": ConfigError("none")}, "free memory", "warning", "none", "--host"),
        ({"locked_limit": 8 << 20}, "locked memory", "warning", "8 MiB", "ulimit -l unlimited"),
        ({"locked_limit": 8 << 20, "nvidia_driver": ""}, "locked memory", "ok", "8 MiB", ""),
        ({"locked_limit": 32 * GB}, "locked memory", "ok", "limit", ""),
        ({"all_disk": 64 << 20}, "shared memory", "warning", "64 MiB", "--shm-size"),
        ({"all_disk": ConfigError("no folder")}, "shared memory", "error", "no folder", "mount"),
        ({"file_system": "tmpfs"}, "disk", "warning", "on tmpfs, which is memory", "local disk"),
        ({"file_system": "nfs4"}, "disk", "warning", "on nfs4, a network", "local disk"),
        ({"file_system": "lustre"}, "disk", "warning", "on lustre, a network", "local disk"),
        ({"file_system": "fuse.s3fs"}, "disk", "warning", "fuse.s3fs, a network", "local disk"),
        ({"file_system": "fuse.x"}, "disk", "warning", "fuse.x, which a program", "local disk"),
        ({"file_system": "overlay"}, "disk", "warning", "removed with its container", "volume"),
        ({"cpu_features": frozenset({"sse2"})}, "CPU", "warning", "no avx2 or asimd", "host's CPU"),
        ({"cpu_features": frozenset()}, "CPU", "ok", "unknown", ""),
        ({"clock_source": "hpet"}, "clock source", "warning", "hpet: each reading", "=tsc"),
        ({"clock_source": ""}, "clock source", "ok", "unknown", ""),
        ({"free_disk": 10**8}, "disk space", "error", "0.1 GB free", "another folder"),
        ({"free_disk": ConfigError("gone")}, "disk space", "error", "gone", "chown"),
        ({"direct_io": "no direct"}, "O_DIRECT", "warning", "page cache", "ext4/xfs"),
        ({"direct_io": PermissionError(13, "denied")}, "O_DIRECT", "error", "denied", "chmod"),
        ({"io_uring": "not permitted"}, "io_uring", "warning", "threads", "io_uring_disabled=0"),
    ],
)  # fmt: skip
def test_each_fault_has_its_line(machine, tmp_path, change, name, state, message, fix):
    machine(**change)
    check = found(tmp_path)[name]
    assert check.state == state
    assert message in check.found
    assert fix in check.fix
    assert bool(check.fix) == (state != "ok")


def config(tmp_path, host="8GB", keep=None, disk="200GB"):
    """A server's `--kv-transfer-config`."""
    tiers = [{"kind": "host", "bytes": host, **({"keep": keep} if keep else {})}]
    tiers.append({"kind": "disk", "bytes": disk, "path": str(tmp_path / "kv")})
    extra = {"tiers": tiers}
    return json.dumps({"kv_connector": "KvtrieConnector", "kv_connector_extra_config": extra})


SHM = "/dev/shm"  # noqa: S108 - a name; no test opens a file there
KEEP = f"{SHM}/kv"


@pytest.mark.parametrize(
    ("change", "server", "name", "state", "message", "fix"),
    [
        ({}, {}, "host tier", "ok", "8.0 GB of 64.0 GB", ""),
        ({"all_memory": 12 * GB}, {}, "host tier", "warning", "leaves 3.2 GB", "limit of 12.8 GB"),
        ({"all_memory": 8 * GB}, {}, "host tier", "error", "up to 8.8 GB", "resources.limits"),
        ({"all_memory": 0}, {}, "host tier", "ok", "8.0 GB of 0.0 GB", ""),
        ({"locked_limit": 8 * GB}, {}, "locked memory", "warning", "below the 8.8 GB", "memlock"),
        ({"locked_limit": 9 * GB}, {}, "locked memory", "ok", "8583 MiB", ""),
        ({"file_system": "tmpfs"}, {"keep": KEEP}, "keep", "ok", "tmpfs of 32.0 GB", ""),
        (
            {"file_system": "tmpfs", "all_disk": 8 * GB}, {"keep": KEEP},
            "keep", "error", "of 8.0 GB, the host tier takes up to 8.8 GB", "sizeLimit",
        ),
        ({}, {"keep": "/kept"}, "keep", "error", "on ext4, which is no memory", SHM),
        (
            {"file_system": "tmpfs", "all_disk": ConfigError("gone")}, {"keep": KEEP},
            "keep", "error", "gone", SHM,
        ),
        ({}, {"disk": "600GB"}, "disk space", "error", "500.0 GB free", "smaller disk tier"),
        ({}, {}, "disk", "ok", "on ext4", ""),
    ],
)  # fmt: skip
def test_a_machine_is_compared_with_the_sizes_of_a_server(
    machine, tmp_path, capsys, change, server, name, state, message, fix
):
    machine(**change)
    options = ["--engine", "vllm", "--kv-transfer-config", config(tmp_path, **server), "--json"]
    assert main(["doctor", *options]) == (state == "error")
    (check,) = [Check(**row) for row in json.loads(capsys.readouterr().out) if row["name"] == name]
    assert check.state == state
    assert message in check.found
    assert fix in check.fix
    assert bool(check.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "--kv-transfer-config is no JSON"),
        ("[]", "--kv-transfer-config"),
        ("{}", "has the kv_connector None, 'KvtrieConnector' wanted"),
        ('{"kv_connector": "P2pNcclConnector"}', "'P2pNcclConnector', 'KvtrieConnector' wanted"),
        (
            '{"kv_connector": "KvtrieConnector", "kv_connector_extra_config": {"tier": []}}',
            "has no 'tier'",
        ),
    ],
)
def test_settings_that_a_server_refuses_are_refused_in_one_line(capsys, given, message):
    assert main(["doctor", "--kv-transfer-config", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_host_tier_in_blocks_has_no_bytes_to_compare(machine):
    machine()
    tier = Tier("host", blocks=9)
    assert "host tier" not in {check.name for check in checks("vllm", tiers=[tier])}


def test_an_error_is_exit_status_1_and_json_has_every_line(machine, capsys):
    machine(free_memory=1)
    assert main(["doctor", "--engine", "vllm", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [Check(**row) for row in rows] == list(checks("vllm"))


def test_engines_that_are_not_installed_are_left_out_unless_they_are_wanted(machine):
    machine()
    assert "sglang" not in {check.name for check in checks()}
    assert "vllm" in {check.name for check in checks()}
    (check,) = [check for check in checks("sglang") if check.name == "sglang"]
    assert (check.state, check.fix) == ("error", "pip install 'sglang==0.5.23'")


def test_a_shared_store_is_written_to_and_read(machine, tmp_path, capsys):
    machine()
    url = f"folder:{tmp_path}/kv"
    assert main(["doctor", "--engine", "vllm", "--remote", url]) == 0
    assert f"{url} writes and reads" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--engine", "vllm", "--remote", f"folder:{tmp_path}/file"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert f"folder:{tmp_path}/file: folder {tmp_path}/file cannot be written" in line


def test_a_store_that_takes_no_value_is_an_error_with_the_reason(
    machine, tmp_path, capsys, monkeypatch
):
    machine()
    full = Result("full", "no space left")
    monkeypatch.setattr(FolderStore, "put_many", lambda _, rows, __: [full] * len(rows))
    assert main(["doctor", "--engine", "vllm", "--remote", f"folder:{tmp_path}/kv"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert f"folder:{tmp_path}/kv: write: full: no space left; fix: kvtrie remote check" in lines[0]


@pytest.mark.parametrize(("failed", "state"), [(0, "ok"), (2, "warning"), (5, "error")])
def test_failed_moves_of_a_server_are_reported(machine, capsys, monkeypatch, failed, state):
    machine()
    tiers = {"host": {"failed": 0, "moves": 9}, "disk": {"failed": failed, "moves": 5}}
    monkeypatch.setattr(control, "ask", lambda *_: {"manager": {"tiers": tiers}})
    assert main(["doctor", "--engine", "vllm", "--control", "/x"]) == (state == "error")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{state} ")
    assert f"{failed} of 5 moves into it failed" in last or not failed


def test_a_folder_that_cannot_be_is_refused_in_one_line(capsys):
    assert main(["doctor", "--disk", "s3://x"]) == 2
    assert "s3:// is not supported" in capsys.readouterr().err


def test_this_machine(tmp_path, capsys):
    main(["doctor", "--disk", str(tmp_path / "none" / "yet")])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "error"}
    assert not list(tmp_path.iterdir())
