"""`kvtrie demo`: the arguments of the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--structure",
        choices=("holes", "leaf-only"),
        default="holes",
        help="whether blocks inside a chat may be dropped (default: %(default)s)",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="random models with different kinds of layers, by family, with --json alone",
    )
    parser.add_argument("--tiny", action="store_true", help="a random model, and seconds")
    parser.add_argument("--seed", type=int, default=1, help="order of turns (default: %(default)s)")
    parser.add_argument(
        "--answer-tokens", type=int, metavar="N", help="the most tokens of an answer"
    )
    parser.add_argument(
        "--gpu-share", type=float, metavar="X", help="room on gpu per block of all KV"
    )
    parser.add_argument(
        "--host-share", type=float, metavar="X", help="room on host per block of all KV"
    )
    parser.add_argument(
        "--disk-share", type=float, metavar="X", help="room on disk per block of all KV"
    )
    disk = parser.add_mutually_exclusive_group()
    disk.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="folder of the disk tier (default: the cache)"
    )
    disk.add_argument("--no-disk", action="store_true", help="gpu and host only")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--picture", type=output_file, metavar="FILE", help="file of the picture")
    picture.add_argument("--no-picture", action="store_true", help="draw none")
    parser.add_argument(
        "--save",
        type=output_file,
        metavar="FILE",
        help="write a report for `kvtrie map` and `stats`",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        if given.hybrid:
            from kvtrie.demo.hybrid import hybrid_demo

            return hybrid_demo(as_json=given.json)
        from kvtrie.demo.run import Options, demo
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; the demo needs: pip install 'kvtrie[demo]'"
        ) from error
    names = ("structure", "tiny", "seed", "answer_tokens", "gpu_share", "host_share", "disk_share")
    chosen = {name: getattr(given, name) for name in (*names, "disk", "picture", "save", "json")}
    # Settings without an argument keep the demo's defaults.
    stated = {name: value for name, value in chosen.items() if value is not None}
    if given.no_picture:
        stated["picture"] = None
    if given.no_disk:
        stated["disk"] = None
    return demo(Options(**stated))


COMMAND = ("a real model, twelve chats whose KV does not fit, and a verdict", _arguments)
"""Help text of the command, and its function for arguments."""
