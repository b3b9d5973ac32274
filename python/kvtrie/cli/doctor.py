"""`kvtrie doctor`: checks whether a machine and its packages can run a server with kvtrie.

Each check is a line: `ok`, `warning` or `error`, the latter two with a command to fix them.
Invariant: the test file for direct writes and the test blocks in a shared store are removed. A
missing folder of a server's disk tier is made. Cost: milliseconds. No engine is imported.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtrie import _kvtrie
from kvtrie.cli.doctor_check import Check
from kvtrie.cli.doctor_disk import disk_checks
from kvtrie.cli.doctor_memory import memory_checks
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.argument import folder as read_folder
from kvtrie.settings.argument import instance, shown
from kvtrie.settings.machine import clock_source, cpu_features, nvidia_driver

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvtrie.settings.tier import Tier

__all__ = ["COMMAND", "ENGINES", "checks", "version_and_commit"]

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 10)
_FAST_HASH = ("avx2", "asimd")  # instructions for hashing keys of blocks
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_CONNECTOR = "KvtrieConnector"
_FAILED = 1
_ABSENT = "not installed"

ENGINES = {
    "vllm": ((0, 30), (0, 32), (0, 33), "0.32.*"),
    "sglang": ((0, 5, 23), (0, 5, 23), (0, 5, 23), "0.5.23"),
}
"""Of each engine: the oldest supported, the tested and the newest supported version, pip's."""

_HYBRIDS = (5, 23)  # of transformers, for `KvtrieCache` of models with different kinds of layers
_BELOW: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 31): (5, 18),
    (0, 32): (5, 20),
    (0, 33): (5, 21),
}
"""The first versions of transformers refused by versions of vLLM."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", metavar="PATH", help="check the folder of a disk tier too")
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", help="compare with the sizes of a vLLM server too"
    )
    parser.add_argument("--remote", metavar="URL", help="write to and read from a shared store too")
    parser.add_argument("--control", metavar="SOCKET", help="failed writes of a running server too")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="a required engine")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    disk = None if given.disk is None else Path(read_folder("--disk", given.disk))
    config = given.kv_transfer_config
    found = list(checks(given.engine, disk, () if config is None else _tiers(config)))
    if given.remote is not None:
        found += _remote(given.remote)
    if given.control is not None:
        found += _server(given.control)
    if given.json:
        sys.stdout.write(json.dumps([asdict(check) for check in found]) + "\n")
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            fix = f"; fix: {check.fix}" if check.fix else ""
            sys.stdout.write(f"{check.state:8} {check.name:{width}}  {check.found}{fix}\n")
    return _FAILED if any(check.state == "error" for check in found) else 0


def _tiers(config: str) -> Sequence[Tier]:
    """Return the tiers of a server, from a `--kv-transfer-config` for vLLM.

    Raises:
        ConfigError: no JSON object, another connector, or settings refused by a server.
    """
    from kvtrie.engines.vllm.settings import Settings

    try:
        read: object = json.loads(config)
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is no JSON: {error}") from error
    instance("--kv-transfer-config", read, Mapping)
    fields = cast("Mapping[str, Any]", read)
    connector = fields.get("kv_connector")
    if connector != _CONNECTOR:
        raise ConfigError(
            f"--kv-transfer-config has the kv_connector {shown(connector)}, {_CONNECTOR!r} wanted"
        )
    return Settings.read(fields.get("kv_connector_extra_config")).tiers or ()


def version_and_commit() -> str:
    """Return the package's version and the commit of its compiled extension."""
    return f"{_kvtrie.__version__} (core {_kvtrie.COMMIT})"


def checks(
    engine: str | None = None, disk: Path | None = None, tiers: Sequence[Tier] = ()
) -> Iterator[Check]:
    """Yield the checks of this machine.

    Args:
        engine: the required engine. None takes the installed engines.
        disk: the folder of a disk tier. None takes the folder in `tiers`.
        tiers: the tiers of a server, for comparison with limits and room.
    """
    yield Check("ok", "kvtrie", version_and_commit())
    yield _python()
    yield _torch()
    for name in ENGINES if engine is None else (engine,):
        check = _engine(name, wanted=engine is not None)
        if check is not None:
            yield check
    yield from _transformers()
    yield _driver()
    yield _features()
    yield _clock()
    of_kind = {tier.kind: tier for tier in tiers}
    yield from memory_checks(of_kind.get("host"))
    tier = of_kind.get("disk")
    if disk is None and tier is not None:
        disk = Path(str(tier.path))
    if disk is not None:
        size = None if tier is None or tier.bytes is None else int(tier.bytes)
        yield from disk_checks(disk, size)


def _python() -> Check:
    if sys.version_info < _OLDEST_PYTHON:
        return Check("error", "Python", platform.python_version(), "uv venv --python 3.12")
    return Check("ok", "Python", platform.python_version())


def _torch() -> Check:
    found = _version("torch")
    if found is None:
        return Check("warning", "torch", _ABSENT, "pip install 'kvtrie[hf]'")
    if _numbers(found) < _OLDEST_TORCH:
        return Check("warning", "torch", f"{found}, 2.10 wanted", "pip install 'torch>=2.10'")
    return Check("ok", "torch", found)


def _engine(name: str, *, wanted: bool) -> Check | None:
    """Check the version of an engine: tested, newer or unsupported. None if absent and optional."""
    oldest, tested, newest, pinned = ENGINES[name]
    fix = f"pip install '{name}=={pinned}'"
    found = _version(name)
    if found is None:
        return Check("error", name, _ABSENT, fix) if wanted else None
    numbers = _numbers(found)[: len(tested)]
    if oldest <= numbers <= newest:
        return Check("ok", name, f"{found}, {'tested' if numbers == tested else 'supported'}")
    if numbers < oldest:
        first = ".".join(map(str, oldest))
        return Check("error", name, f"{found}, unsupported: older than {first}", fix)
    last = ".".join(map(str, newest))
    return Check("warning", name, f"{found}, newer than {last}, the last supported version", fix)


def _transformers() -> Iterator[Check]:
    """Check transformers: vLLM and models with different kinds of layers need separate versions."""
    found, vllm = _version("transformers"), _version("vllm")
    if found is None:
        return
    below = None if vllm is None else _BELOW.get(_numbers(vllm)[:2])
    if below is not None and _numbers(found) >= below:
        first = ".".join(map(str, below))
        fix = f"pip install 'transformers<{first}'; a second environment for KvtrieCache"
        text = f"{found}, and vLLM {vllm} takes versions below {first}"
        yield Check("warning", "transformers", text, fix)
    elif _numbers(found)[:2] < _HYBRIDS:
        where = "" if vllm is None else ", in an environment without vLLM"
        text = f"{found}; KvtrieCache of models whose layers differ needs 5.23{where}"
        yield Check("ok", "transformers", text)
    else:
        yield Check("ok", "transformers", found)


def _driver() -> Check:
    found = nvidia_driver()
    return Check("ok", "NVIDIA driver", found or "none, so kvtrie uses the CPU")


def _features() -> Check:
    found = cpu_features()
    fast = [name for name in _FAST_HASH if name in found]
    if found and not fast:
        text = f"no {' or '.join(_FAST_HASH)}: keys of blocks are hashed more slowly"
        return Check("warning", "CPU", text, "a virtual machine with its host's CPU model")
    return Check("ok", "CPU", ", ".join(fast) or "features unknown")


def _clock() -> Check:
    source = clock_source()
    if source and source not in _FAST_CLOCKS:
        text = f"{source}: each reading of the time is a system call"
        return Check("warning", "clock source", text, "clocksource=tsc for the kernel")
    return Check("ok", "clock source", source or "unknown")


def _remote(url: str) -> list[Check]:
    """Check each operation of a shared store once."""
    from kvtrie.tiers.remote.check import check_store
    from kvtrie.tiers.remote.url import RemoteUrl

    parsed = RemoteUrl.parse("--remote", url)
    try:
        report = check_store(parsed, sizes=())
    except KvtrieError as error:
        return [Check("error", "remote", f"{parsed}: {error}", "make the store reachable")]
    failed = [step for step in report.steps if not step.ok]
    if not failed:
        return [Check("ok", "remote", f"{parsed} writes and reads")]
    fix = f"kvtrie remote check {parsed}"
    return [Check("error", "remote", f"{parsed}: {one.name}: {one.detail}", fix) for one in failed]


def _server(socket: str) -> list[Check]:
    """Check for failed writes into the tiers of a running server."""
    from kvtrie.cli.control import ask

    tiers = ask(socket, "/stats")["manager"]["tiers"]
    found: list[Check] = []
    for name, tier in tiers.items():
        failed, moves = tier["failed"], tier["moves"]
        if failed:
            text = f"{failed} of {moves} moves into it failed"
            fix = "the reason is in the server's log, once a day: grep kvtrie"
            found.append(
                Check("error" if failed >= moves else "warning", f"tier {name}", text, fix)
            )
    return found or [Check("ok", "server", "no move into a tier has failed")]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version before its first letter."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0])))


COMMAND = ("check that this machine can run a server with kvtrie", _arguments)
