"""Options of `kvtrie vllm` and `kvtrie sglang`. The engine's own options follow after `--`.

Invariant: an option with a value is given at most once, except `--set`. Cost: none.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvtrie.model.layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_options", "ranking_of"]


class _Once(argparse.Action):
    """An option allowed once."""

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


def add_options(engine: str, parser: argparse.ArgumentParser) -> None:
    """Add the options for a server of an engine, "vllm" or "sglang"."""
    serves = f"{engine} serve"
    parser.usage = f"kvtrie {engine} MODEL [OPTIONS] [-- ARGS]"
    parser.epilog = f"Arguments after ' -- ' are arguments of `{serves}`."
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
            help="file in a memory file system, as /dev/shm/kv, for the host memory: the next "
            "server finds its blocks. Needs --host with a size",
        )
    add("--disk", action=_Once, metavar="PATH:SIZE", help="folder and size of the disk tier")
    add("--remote", action=_Once, metavar="URL", help="store shared by several servers")
    add(
        "--format",
        action=_Once,
        choices=tuple(FORMATS),
        help="number format of the tiers below the GPU, with --set calibration=FILE",
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
        help="a further setting, as deadline_s=5 or of a tier disk.durability=fsync"
        if engine == "vllm"
        else "a further setting of the storage, as durability=fsync",
    )
    add("--policy", action=_Once, metavar="NAME", help="policy for ranking blocks for eviction")
    add(
        "--objective",
        action=_Once,
        choices=("cost", "balanced", "hits"),
        help="quantity saved by policies with values",
    )
    add("--events", action="store_true", help="publish KV events by ZMQ")
    add(
        "--control",
        action=_Once,
        metavar="SOCKET",
        help="unix socket for `kvtrie ctl` and `kvtrie why`, or NAME-0.sock, NAME-1.sock with "
        "data-parallel servers",
    )
    add("--print", action="store_true", help="print the command for a shell, and start nothing")


def ranking_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the given settings for ranking blocks."""
    named = {"policy": given.policy, "objective": given.objective}
    return {name: value for name, value in named.items() if value is not None}
