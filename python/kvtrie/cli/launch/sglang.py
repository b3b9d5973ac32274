"""The command of an SGLang server: the radix cache, or a storage of its hierarchical cache.

Invariant: a setting unknown to the chosen cache is refused. Cost: `--set` with a storage imports
its settings.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtrie.cli.launch.flags import events_flag, number_of, refuse
from kvtrie.cli.launch.options import ranking_of
from kvtrie.cli.launch.sizes import sizes_of
from kvtrie.cli.set_option import set_values, types_of
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import url
from kvtrie.settings.sizes import size
from kvtrie.settings.tier import Tier

if TYPE_CHECKING:
    import argparse

__all__ = ["sglang_command"]

_GB = 10**9
_RADIX_SETS = ("--radix-cache-backend", "--radix-eviction-policy-config")
_HICACHE_SETS = (
    "--enable-hierarchical-cache",
    "--enable-hicache",
    "--hicache-size",
    "--hicache-ratio",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
)
_STORAGE = {
    "backend_name": "kvtrie",
    "module_path": "kvtrie.engines.sglang.storage",
    "class_name": "KvtrieHiCache",
    "interface_v1": 1,
}


def sglang_command(given: argparse.Namespace, args: list[str]) -> list[str]:
    """Return the command of an SGLang server with the radix cache or a hierarchical cache."""
    if given.control is not None:
        raise ConfigError("--control: SGLang servers have no control socket, unlike vLLM servers")
    if given.format is not None:
        raise ConfigError(
            "--format: the storage keeps pages as SGLang has them; -- --kv-cache-dtype fp8_e4m3 "
            "halves their bytes"
        )
    storage = _storage(given)
    refuse(args, ("--model-path", "--model", *_RADIX_SETS, *_HICACHE_SETS))
    command = ["sglang", "serve", "--model-path", given.model]
    events = events_flag(given, args, {"publisher": "zmq"})
    flags = _radix(given) if storage is None else _hicache(given, args, storage)
    return [*command, *flags, *events, *args]


def _radix(given: argparse.Namespace) -> list[str]:
    """Return the flags of the radix cache.

    Raises:
        ConfigError: a setting of host memory, absent from the radix cache.
    """
    if given.layerwise:
        raise ConfigError(
            "--layerwise without --disk or --remote: the radix cache loads nothing, and SGLang's "
            "hierarchical cache loads layer by layer by itself"
        )
    if given.host is not None:
        raise ConfigError(
            f"--host is {given.host} without --disk or --remote: the radix cache keeps blocks in "
            "GPU memory only, while SGLang's hierarchical cache has host memory and takes both"
        )
    ranking = ranking_of(given)
    for name, value in set_values(given.set, dict.fromkeys(("policy", "objective"), str)).items():
        if name in ranking:
            raise ConfigError(f"--set {name} and --{name}: leave out either option")
        ranking[name] = value
    flags = ["--radix-cache-backend", "kvtrie"]
    return [*flags, "--radix-eviction-policy-config", json.dumps(ranking)] if ranking else flags


def _hicache(given: argparse.Namespace, args: list[str], storage: dict[str, Any]) -> list[str]:
    """Return the flags of the hierarchical cache over a storage.

    Raises:
        ConfigError: a setting unknown to the storage, or too little host memory.
    """
    if ranking := ranking_of(given):
        raise ConfigError(
            f"--{next(iter(ranking))} and --disk or --remote: the storage of SGLang's hierarchical "
            "cache lacks this setting: leave out either option"
        )
    ranks = number_of(args, "--tp-size", "--tensor-parallel-size", "--tp")
    ranks *= number_of(args, "--pp-size", "--pipeline-parallel-size", "--pp")
    sizes = sizes_of(given, number_of(args, "--dp-size", "--data-parallel-size", "--dp"))
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
    """Return the settings of a storage without its size, or None for the radix cache.

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
            f"--{' and --'.join(places)}: the hierarchical cache has a single storage, leave out "
            "the rest"
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
