"""`kvtrie vllm` and `kvtrie sglang`: start a server with kvtrie by one line.

The command builds the engine's own flags and replaces its process with the engine, so that
signals, the exit status and a service manager reach the engine.
Invariant: no flag of the caller is overridden: one that kvtrie sets, and one that is given twice,
is refused before the engine starts. Cost: that of `import kvtrie`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrie import BlockManager
from kvtrie.argument import url, word
from kvtrie.cli.set_option import set_values, types_of
from kvtrie.engines.control import socket_path
from kvtrie.errors import ConfigError
from kvtrie.layout import FORMATS
from kvtrie.sizes import (
    all_disk,
    all_memory,
    check_exists,
    free_disk,
    free_memory,
    is_share,
    path_and_size,
    size,
)
from kvtrie.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "run"]

_DEFAULT_HOST = "25%"
_GB = 10**9
_ADDRESS = re.compile(r"localhost|[\w:-]*[.:][\w.:-]*")
_MOST_DIGITS = 19  # of a number of processes
_SHORTEST = 8  # characters of an abbreviated flag that an engine takes for the whole one
_VLLM_SETS = ("--kv-transfer-config", "--kv-offloading-size", "--model")
_RADIX_SETS = ("--radix-cache-backend", "--radix-eviction-policy-config")
_HICACHE_SETS = (
    "--enable-hierarchical-cache",
    "--enable-hicache",
    "--hicache-size",
    "--hicache-ratio",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
)
_NOT_ABBREVIATIONS = ("--radix-eviction-policy",)
_STORAGE = {
    "backend_name": "kvtrie",
    "module_path": "kvtrie.engines.sglang.storage",
    "class_name": "KvtrieHiCache",
    "interface_v1": 1,
}


class _Once(argparse.Action):
    """An option that may be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def _arguments(engine: str, parser: argparse.ArgumentParser) -> None:
    serves = f"{engine} serve"
    parser.usage = f"kvtrie {engine} MODEL [OPTIONS] [-- ARGS]"
    parser.epilog = f"Arguments that follow ' -- ' are those of `{serves}`."
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"the model, as `{serves}` takes it")
    add(
        "--host",
        action=_Once,
        metavar="SIZE",
        help="host memory of the server, as 8GB, 512MiB or 25%% of the free memory "
        "(default: a quarter of the free memory)",
    )
    if engine == "vllm":
        add(
            "--keep",
            action=_Once,
            metavar="PATH",
            help="file in a memory file system, such as /dev/shm/kv, that is the host memory, so "
            "that the next server finds the blocks; needs --host with a size",
        )
    add("--disk", action=_Once, metavar="PATH:SIZE", help="folder and size of the disk tier")
    add("--remote", action=_Once, metavar="URL", help="store that several servers share")
    add(
        "--format",
        action=_Once,
        choices=tuple(FORMATS),
        help="number format of the tiers below the GPU; needs --set calibration=FILE",
    )
    add(
        "--layerwise",
        action="store_true",
        help="load each layer just before a step reads it",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting, as deadline_s=5 or of a tier disk.durability=fsync"
        if engine == "vllm"
        else "any other setting of the storage, as durability=fsync",
    )
    add("--policy", action=_Once, metavar="NAME", help="policy that ranks blocks for eviction")
    add(
        "--objective",
        action=_Once,
        choices=("cost", "balanced", "hits"),
        help="what policies by value save",
    )
    add("--events", action="store_true", help="publish KV events by ZMQ")
    add(
        "--control",
        action=_Once,
        metavar="SOCKET",
        help="unix socket for `kvtrie ctl` and `kvtrie why`; NAME-0.sock, NAME-1.sock with "
        "data-parallel servers",
    )
    add("--print", action="store_true", help="print the command for a shell, and start nothing")


def run(engine: str, words: Sequence[str]) -> int:
    """Replace this process with a server of an engine, or print its command.

    Args:
        engine: "vllm" or "sglang".
        words: the words after `kvtrie vllm` or `kvtrie sglang`.

    Raises:
        ConfigError: a wrong size, path or policy; a flag of the engine that kvtrie sets; an engine
            that is not installed.
    """
    end = words.index("--") if "--" in words else len(words)
    own, args = list(words[:end]), list(words[end + 1 :])
    parser = argparse.ArgumentParser(prog=f"kvtrie {engine}", allow_abbrev=False)
    _arguments(engine, parser)
    given, strange = parser.parse_known_args(own)
    if strange:
        parser.error(
            f"unknown arguments: {shlex.join(strange)}; arguments of `{engine} serve` follow ' -- '"
        )
    if given.policy is not None:
        word("--policy", given.policy, tuple(BlockManager.policies()))
    command = _ENGINES[engine](given, args)
    if given.print:
        sys.stdout.write(shlex.join(command) + "\n")
        return 0
    return _replace(command)


class _Sizes(NamedTuple):
    """Sizes of one server, as the engine's settings take them."""

    host: int | str
    path: str | None
    disk: int | str


def _vllm(given: argparse.Namespace, args: list[str]) -> list[str]:
    """The command of a vLLM server with `KvtrieConnector`."""
    _refuse(args, _VLLM_SETS)
    servers = _number(args, "--data-parallel-size", "-dp")
    sizes = _sizes(given, servers)
    tiers: list[dict[str, Any]] = [{"kind": "host", "bytes": sizes.host, **_keep(given, servers)}]
    if sizes.path is not None:
        tiers.append({"kind": "disk", "bytes": sizes.disk, "path": sizes.path})
    if given.remote is not None:
        tiers.append({"kind": "remote", "path": url("--remote", given.remote)})
    if given.format is not None:
        tiers[0]["format"] = given.format
    extra: dict[str, Any] = {"tiers": tiers, **_ranking(given)}
    for name, stated in (("events", given.events), ("use_layerwise", given.layerwise)):
        if stated:
            extra[name] = True
    if given.control is not None:
        extra["control"] = _control(given.control, servers)
    _set_vllm(given.set, extra)
    config = {
        "kv_connector": "KvtrieConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvtrie" not in plugins.split(","):
        config["kv_connector_module_path"] = "kvtrie.engines.vllm"
    command = ["vllm", "serve", given.model, "--kv-transfer-config", json.dumps(config)]
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    return [*command, *_events(given, args, events), *args]


def _set_vllm(stated: Sequence[str], extra: dict[str, Any]) -> None:
    """Put `--set` into the settings of the connector.

    Raises:
        ConfigError: as `set_values`; a tier that the server does not have, or a setting that
            another option gives.
    """
    if not stated:
        return
    from kvtrie.engines.vllm.settings import KEYS, TIER_KEYS, Settings

    types = types_of((key for key in KEYS if key != "tiers"), Settings)
    tiers = {row["kind"]: row for row in extra["tiers"]}
    for kind in ("host", "disk", "remote"):
        own = (key for key in TIER_KEYS if key not in {"kind", "path"})
        types |= {f"{kind}.{key}": each for key, each in types_of(own, Tier).items()}
    for name, value in set_values(stated, types).items():
        kind, dot, key = name.rpartition(".")
        if dot and kind not in tiers:
            raise ConfigError(f"--set {name}, and there is no {kind} tier: --{kind} makes it")
        row = tiers[kind] if dot else extra
        if key in row:
            raise ConfigError(
                f"--set {name}, and another option gives {key}: leave one of them out"
            )
        row[key] = value


def _sglang(given: argparse.Namespace, args: list[str]) -> list[str]:
    """The command of an SGLang server: the radix cache, or a storage of its hierarchical cache."""
    if given.control is not None:
        raise ConfigError("--control: SGLang servers have no control socket, vLLM servers have one")
    if given.format is not None:
        raise ConfigError(
            "--format: the storage keeps pages as SGLang has them; -- --kv-cache-dtype fp8_e4m3 "
            "halves their bytes"
        )
    storage = _storage(given)
    _refuse(args, ("--model-path", "--model", *_RADIX_SETS, *_HICACHE_SETS))
    command = ["sglang", "serve", "--model-path", given.model]
    events = _events(given, args, {"publisher": "zmq"})
    flags = _radix(given) if storage is None else _hicache(given, args, storage)
    return [*command, *flags, *events, *args]


def _radix(given: argparse.Namespace) -> list[str]:
    """The flags of the radix cache.

    Raises:
        ConfigError: a setting of host memory, which it does not have.
    """
    if given.layerwise:
        raise ConfigError(
            "--layerwise without --disk or --remote: the radix cache loads nothing; SGLang's "
            "hierarchical cache loads layer by layer by itself"
        )
    if given.host is not None:
        raise ConfigError(
            f"--host is {given.host} without --disk or --remote: the radix cache keeps blocks in "
            "GPU memory only; SGLang's hierarchical cache, which has host memory, takes both"
        )
    ranking = _ranking(given)
    for name, value in set_values(given.set, dict.fromkeys(("policy", "objective"), str)).items():
        if name in ranking:
            raise ConfigError(f"--set {name} and --{name}: leave one of them out")
        ranking[name] = value
    flags = ["--radix-cache-backend", "kvtrie"]
    return [*flags, "--radix-eviction-policy-config", json.dumps(ranking)] if ranking else flags


def _hicache(given: argparse.Namespace, args: list[str], storage: dict[str, Any]) -> list[str]:
    """The flags of the hierarchical cache over a storage.

    Raises:
        ConfigError: a setting that it does not have, or too little host memory.
    """
    if ranking := _ranking(given):
        raise ConfigError(
            f"--{next(iter(ranking))} and --disk or --remote: the storage of SGLang's hierarchical "
            "cache has no such setting; leave one of the two out"
        )
    ranks = _number(args, "--tp-size", "--tensor-parallel-size", "--tp")
    ranks *= _number(args, "--pp-size", "--pipeline-parallel-size", "--pp")
    sizes = _sizes(given, _number(args, "--dp-size", "--data-parallel-size", "--dp"))
    host = size("--host", sizes.host)
    if not (gigabytes := host // ranks // _GB):
        raise ConfigError(
            f"--host is {host} bytes for {ranks} ranks: SGLang takes whole gigabytes per rank, at "
            f"least {ranks}GB wanted"
        )
    if sizes.path is not None:
        storage |= {"path": sizes.path, "bytes": sizes.disk}
    flags = ["--enable-hierarchical-cache", "--hicache-size", str(gigabytes)]
    flags += ["--hicache-storage-backend", "dynamic"]
    return [*flags, "--hicache-storage-backend-extra-config", json.dumps(_STORAGE | storage)]


def _storage(given: argparse.Namespace) -> dict[str, Any] | None:
    """The settings of a storage but for its size; None without one, which is the radix cache.

    Raises:
        ConfigError: two places, or as `set_values`.
    """
    kept = any(one.startswith("keep=") for one in given.set)
    places = [name for name in ("disk", "remote") if getattr(given, name) is not None]
    places += ["set keep"] if kept else []
    if not places:
        return None
    if len(places) > 1:
        raise ConfigError(
            f"--{' and --'.join(places)}: the hierarchical cache has one storage, leave one out"
        )
    storage: dict[str, Any] = {}
    if given.remote is not None:
        storage["path"] = url("--remote", given.remote)
    if given.set:
        from kvtrie.engines.sglang.pages import KEYS, PageSettings

        taken = {"path", "bytes"} if given.disk is not None else {"path"}
        types = types_of((key for key in KEYS if key not in taken), Tier, PageSettings)
        storage |= set_values(given.set, types)
    return storage


def _sizes(given: argparse.Namespace, servers: int) -> _Sizes:
    """Checked sizes; a share becomes bytes, and data-parallel servers divide host memory.

    Raises:
        ConfigError: no size, more than the machine has, or a disk of several servers.
    """
    text = _DEFAULT_HOST if given.host is None else given.host
    try:
        host = size("--host", text, of=free_memory)
    except ConfigError as error:
        if _ADDRESS.fullmatch(text) is None:
            raise
        raise ConfigError(
            f"{error}; the address that the engine binds to follows ' -- ': -- --host {text}"
        ) from None
    check_exists("--host", host, all_memory(), "this machine or its control group")
    exact = is_share(text) or servers > 1
    if given.disk is None:
        return _Sizes(host // servers if exact else text, None, 0)
    path, room = path_and_size("--disk", given.disk)
    if servers > 1:
        raise ConfigError(
            f"--disk and {servers} data-parallel servers: one process writes to a store; start a "
            "server per rank, each with a separate folder"
        )
    path = str(Path(path).absolute())
    disk = size("size of --disk", room, of=lambda: free_disk(path))
    check_exists("--disk", disk, all_disk(path), f"the file system of {path}")
    return _Sizes(host if exact else text, path, disk if is_share(room) else room)


def _keep(given: argparse.Namespace, servers: int) -> dict[str, str]:
    """The setting of host memory that the next server finds.

    Raises:
        ConfigError: host memory whose size differs at each start, or several servers.
    """
    if given.keep is None:
        return {}
    if given.host is None or is_share(given.host):
        raise ConfigError(
            f"--keep with --host {given.host or _DEFAULT_HOST}: a share of the free memory differs "
            "at each start, and a file of another size is made again; give a size as 8GB"
        )
    if servers > 1:
        raise ConfigError(
            f"--keep and {servers} data-parallel servers: one process writes to a file; start a "
            "server per rank, each with a separate path"
        )
    return {"keep": str(Path(given.keep).absolute())}


def _control(given: str, servers: int) -> str:
    """The path of a control socket, with a place for the rank where several servers run."""
    path = Path(given).absolute()
    if servers > 1:
        path = path.with_name(f"{path.stem}-{{rank}}{path.suffix}")
    return socket_path("--control", str(path))


def _ranking(given: argparse.Namespace) -> dict[str, str]:
    named = {"policy": given.policy, "objective": given.objective}
    return {name: value for name, value in named.items() if value is not None}


def _events(given: argparse.Namespace, args: list[str], config: dict[str, Any]) -> list[str]:
    """The flag that publishes events, unless the caller gives it."""
    if not given.events or any(_names(arg, "--kv-events-config") for arg in args):
        return []
    return ["--kv-events-config", json.dumps(config)]


def _refuse(args: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse flags that kvtrie sets, on the command line and in a configuration file of ours.

    Raises:
        ConfigError: one is there.
    """
    for flag in flags:
        for arg in args:
            if _names(arg, flag):
                raise ConfigError(f"{arg.partition('=')[0]} is given, and kvtrie sets {flag}")
    if (file := _value(args, "--config")) is None:
        return
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):  # the engine says what is wrong with its file
        return
    for key in re.findall(r"^\s*['\"]?([\w-]+)['\"]?\s*:", text, re.MULTILINE):
        if (flag := "--" + key.replace("_", "-")) in flags and flag != "--model":
            raise ConfigError(f"{file} has {key}, and kvtrie sets {flag}")


def _names(arg: str, flag: str) -> bool:
    """Whether a word is a flag, in one of the forms that engines accept."""
    name = re.split("[=.]", arg, maxsplit=1)[0].replace("_", "-")
    short = len(name) >= _SHORTEST and flag.startswith(name) and name not in _NOT_ABBREVIATIONS
    return arg.startswith("--") and (name == flag or short)


def _value(args: Sequence[str], *flags: str) -> str | None:
    """The value of a flag of the engine; None if it is not given."""
    for at, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") in flags:
            return value if equals else next(iter(args[at + 1 :]), None)
    return None


def _number(args: Sequence[str], *flags: str) -> int:
    """The number of processes that a flag of the engine gives; 1 if it does not."""
    value = _value(args, *flags)
    return (
        max(1, int(value))
        if value is not None and value.isdecimal() and len(value) < _MOST_DIGITS
        else 1
    )


def _replace(command: list[str]) -> int:
    """Become the engine that is installed with kvtrie, or else the one on PATH.

    Raises:
        ConfigError: it is not installed, or cannot be started.
    """
    name = command[0]
    near = Path(sys.executable).with_name(name)
    path = str(near) if os.access(near, os.X_OK) else shutil.which(name)
    if path is None:
        raise ConfigError(
            f"there is no {name} next to {sys.executable} or on PATH: pip install {name} in the "
            "environment that has kvtrie"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, [path, *command[1:]])  # noqa: S606 - replaces this process, without a shell
    except OSError as error:
        raise ConfigError(f"cannot start {path}: {error.strerror}") from error


_ENGINES: dict[str, Callable[[argparse.Namespace, list[str]], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
}
COMMANDS = {
    name: (f"start {title} with kvtrie", partial(_arguments, name))
    for name, title in (("vllm", "a vLLM server"), ("sglang", "an SGLang server"))
}
