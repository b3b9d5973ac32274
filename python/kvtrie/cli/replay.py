"""`kvtrie replay`: a trace of block hashes through a manager without bytes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.tier import Tier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from kvtrie.cli.commands import Commands
    from kvtrie.sim.replay import Replayed
    from kvtrie.sim.trace import Request

__all__ = ["add"]

_LONG = 2000
_ON_THE_MAP = 24


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="a trace of block hashes through a manager, without bytes",
        description="Plays a trace (JSON lines with timestamp, input_length, output_length and "
        "hash_ids) through a manager and counts what each tier would have held.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the trace's file")
    parser.add_argument(
        "--tier",
        action="append",
        type=_tier,
        metavar="KIND=BLOCKS",
        help="a tier and its room, fastest first; may be given up to four times (default: gpu=5859)",
    )
    parser.add_argument(
        "--policy", default="retention", metavar="NAME", help="what leaves (default: %(default)s)"
    )
    parser.add_argument(
        "--structure",
        choices=("leaf-only", "holes"),
        default="leaf-only",
        help="whether blocks inside a sequence may be dropped (default: %(default)s)",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens that a hash stands for (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        choices=("all", "plan"),
        default="all",
        help="load all that lower tiers hold, or compute again what is sooner computed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help=f"write a report with the last {_ON_THE_MAP} requests for `kvtrie map` and `stats`",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run)


def _tier(text: str) -> Tier:
    """A tier from `KIND=BLOCKS`."""
    kind, _, blocks = text.partition("=")
    return Tier(kind, blocks=int(blocks), owner="none")  # pyright: ignore[reportArgumentType]


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.replay import open_manager, replay
    from kvtrie.sim.trace import read_trace

    requests = read_trace(given.trace)
    manager = open_manager(
        given.tier or [Tier("gpu", blocks=5859)],
        policy=given.policy,
        structure=given.structure,
        block_tokens=given.block_tokens,
    )
    played = replay(_watched(requests, quiet=given.json), manager, load=given.load)
    title = f"{given.trace.name}, {given.policy}, {given.structure}"
    if given.save is not None:
        from kvtrie.demo.report import capture, write_report

        first = max(0, len(requests) - _ON_THE_MAP)
        last = {f"request {at + 1}": requests[at].blocks for at in range(first, len(requests))}
        write_report(given.save, capture(manager, title, last, manager.stats()["now"]))
    names = ("policy", "structure", "block_tokens", "load")
    settings = {"trace": str(given.trace), **{name: getattr(given, name) for name in names}}
    sys.stdout.write(_json(settings, played) if given.json else _text(title, played))
    return 0


def _watched(requests: Sequence[Request], *, quiet: bool) -> Iterable[Request]:
    """The requests, with a progress bar if there are many and somebody looks."""
    if quiet or len(requests) < _LONG or not sys.stderr.isatty():
        return requests
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return requests
    return track(requests, description="Replaying", console=Console(stderr=True), transient=True)


def _json(settings: dict[str, Any], played: Replayed) -> str:
    figures = {**settings, **dataclasses.asdict(played)}
    figures |= {"hit_rate": played.hit_rate, "evictions": played.evictions}
    return json.dumps(figures) + "\n"


def _text(title: str, played: Replayed) -> str:
    lines = [
        title,
        f"{played.requests} requests, {played.blocks} blocks, {played.tokens} tokens"
        + (f"; {played.refused} requests did not fit" if played.refused else ""),
        f"prefix hits {played.hit_rate:.4f} ({played.hits} blocks); {played.recomputed} blocks "
        f"computed again inside a match; {played.waited_s:.1f} s waited for loads",
        "",
        f"{'tier':8}{'blocks':>10}{'hits':>10}{'of all':>8}{'clean':>10}{'demoted':>10}"
        f"{'dropped':>10}",
    ]
    for tier in played.tiers:
        share = tier.hits / played.blocks if played.blocks else 0.0
        lines.append(
            f"{tier.kind:8}{tier.blocks:10d}{tier.hits:10d}{share:8.4f}{tier.clean:10d}"
            f"{tier.demoted:10d}{tier.dropped:10d}"
        )
    return "\n".join(lines) + "\n"
