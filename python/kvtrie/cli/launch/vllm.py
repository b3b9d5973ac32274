"""The command of a vLLM server with `KvtrieConnector`.

Invariant: each setting of the connector comes from a single option. Cost: `--set` imports the
settings of the connector.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.launch.flags import events_flag, given_of, number_of, refuse
from kvtrie.cli.launch.options import ranking_of
from kvtrie.cli.launch.sizes import keep, sizes_of
from kvtrie.cli.set_option import set_values, types_of
from kvtrie.engines.server.control import socket_path
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import url
from kvtrie.settings.tier import Tier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["vllm_command"]

_SETS = ("--kv-transfer-config", "--kv-offloading-size", "--model")


def vllm_command(given: argparse.Namespace, args: list[str]) -> list[str]:
    """Return the command of a vLLM server with `KvtrieConnector`."""
    refuse(args, _SETS)
    servers = number_of(args, "--data-parallel-size", "-dp")
    own_servers = _servers_here(args, servers)
    sizes = sizes_of(given, own_servers, parts=True)
    tiers: list[dict[str, Any]] = [{"kind": "host", "bytes": sizes.host, **keep(given)}]
    if sizes.path is not None:
        tiers.append({"kind": "disk", "bytes": sizes.disk, "path": sizes.path})
    if given.remote is not None:
        tiers.append({"kind": "remote", "path": url("--remote", given.remote)})
    if given.format is not None:
        tiers[0]["format"] = given.format
    extra: dict[str, Any] = {"tiers": tiers, **ranking_of(given)}
    for name, stated in (("events", given.events), ("use_layerwise", given.layerwise)):
        if stated:
            extra[name] = True
    if given.control is not None:
        extra["control"] = _control(given.control, servers)
    _put_settings(given.set, extra)
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
    return [*command, *events_flag(given, args, events), *args]


def _servers_here(args: Sequence[str], servers: int) -> int:
    """Return the number of data-parallel servers sharing this machine's memory and disk."""
    if given_of(args, "--data-parallel-rank", "-dpn") is not None:  # only this server
        return 1
    return number_of(args, "--data-parallel-size-local", "-dpl", absent=servers)


def _put_settings(stated: Sequence[str], extra: dict[str, Any]) -> None:
    """Put `--set` into the settings of the connector.

    Raises:
        ConfigError: as `set_values`, a tier missing from the server, or a setting given twice.
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
            raise ConfigError(f"--set {name}, and another option gives {key}: leave out either")
        row[key] = value


def _control(given: str, servers: int) -> str:
    """Return the path of a control socket, with a placeholder for the rank of several servers."""
    path = Path(given).absolute()
    if servers > 1:
        path = path.with_name(f"{path.stem}-{{rank}}{path.suffix}")
    return socket_path("--control", str(path))
