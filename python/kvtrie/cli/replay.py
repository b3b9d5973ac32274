"""`kvtrie replay`: a trace of block hashes through a manager without bytes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.lenient import lenient_status
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import word
from kvtrie.settings.tier import DEFAULT_POLICY, Tier
from kvtrie.sim.fates import MOST_TURNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie._kvtrie import BlockManager, Eviction
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.resume import ResumePoints
    from kvtrie.sim.config import TraceSource
    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.replay import Replayed
    from kvtrie.sim.trace import TraceRequest

__all__ = ["COMMAND", "add_model", "add_tiers", "add_trace", "model_of", "source_of"]

_ON_THE_MAP = 24
_COLUMNS = (
    *("at", "block", "position", "lora", "tier", "to", "layers", "cause", "reason"),
    *("uses", "idle", "cost", "terms"),
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_tiers(parser, several=True)
    add_model(parser)
    parser.add_argument(
        "--ends",
        action="store_true",
        help="send a hint when a session has had its last request",
    )
    parser.add_argument(
        "--objective",
        choices=("cost", "balanced", "hits"),
        default="cost",
        help="the quantity saved by policies with values (default: %(default)s)",
    )
    parser.add_argument(
        "--rooms",
        type=_rooms,
        metavar="BLOCKS,BLOCKS",
        help="rooms for several policies (default: 1, 3, 10 and 30 %% of the distinct blocks)",
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw the cost saved by several policies"
    )
    parser.add_argument(
        "--save",
        type=output_file,
        metavar="FILE",
        help=f"write a report for `kvtrie map` and `kvtrie stats`, with {_ON_THE_MAP} requests",
    )
    parser.add_argument(
        "--evictions",
        type=int,
        default=0,
        metavar="N",
        help="print the last N evictions, with their ranks' terms",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_run)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a trace and its format."""
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="JSON lines with timestamp, input_length, output_length and hash_ids, or see --format",
    )
    parser.add_argument(
        "--format",
        default="mooncake",
        metavar="NAME",
        help="of TRACE: mooncake, tokens, azure, burstgpt or sharegpt (default: %(default)s)",
    )
    parser.add_argument(
        "--time-unit",
        default="auto",
        metavar="UNIT",
        help="of timestamp in a Mooncake trace: s, ms, us or ns (default: by its first value)",
    )
    parser.add_argument(
        "--lenient", action="store_true", help="leave out invalid lines, and count them"
    )


def source_of(given: argparse.Namespace) -> TraceSource:
    """Return the trace named by these arguments.

    Raises:
        ConfigError: an unknown format or unit.
    """
    from kvtrie.sim.config.trace import FORMATS, TraceSource, checked
    from kvtrie.sim.readers.times import TIME_UNITS

    word("--format", given.format, FORMATS)
    unit = word("--time-unit", given.time_unit, TIME_UNITS)
    size = given.block_tokens
    return checked(TraceSource(given.trace, given.format, hash_tokens=size, time_unit=unit))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the model and of its groups and resume points."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="gemma-3-27b, gpt-oss-120b, qwen3-next-80b or llama-3.1-8b, in bfloat16: the room of "
        "a tier may be bytes then, as gpu=32GiB, and groups of layers keep only needed blocks",
    )
    parser.add_argument(
        "--groups",
        choices=("on", "off"),
        default="on",
        help="off keeps all layers of all tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--points",
        type=int,
        metavar="N",
        help="resume points: a number below the tokens of a block is a number per path (default: "
        "1), otherwise a point every N tokens",
    )


def add_tiers(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the arguments of tiers and policies for a replay."""
    parser.add_argument(
        "--tier",
        action="append",
        type=_tier,
        metavar="KIND=BLOCKS",
        help="a tier and its room in blocks, or with a model in bytes as 32GiB, fastest first, up "
        "to four times (default: gpu=5859)",
    )
    more = "; several, with commas, are compared with lru over --rooms" if several else ""
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        metavar="NAME",
        help=f"the eviction policy (default: %(default)s){more}",
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
        help="tokens per hash (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        choices=("all", "plan"),
        default="all",
        help="load all blocks of lower tiers, or compute blocks if sooner (default: %(default)s)",
    )


def _tier(text: str) -> Tier:
    """Return a tier from `KIND=BLOCKS` or `KIND=BYTES`, bytes with a unit."""
    kind, _, room = text.partition("=")
    try:
        if room[-1:].isalpha():
            return Tier(kind, bytes=room)  # pyright: ignore[reportArgumentType]
        return Tier(kind, blocks=int(room))  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"KIND=BLOCKS wanted, not {text!r}") from error


def _rooms(text: str) -> list[int]:
    """Return rooms from numbers with commas."""
    try:
        rooms = sorted({int(room) for room in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"BLOCKS,BLOCKS wanted, not {text!r}") from error
    if rooms[0] < 1:
        raise argparse.ArgumentTypeError(f"a room of {rooms[0]} blocks, at least 1 wanted")
    return rooms


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.readers.lines import MOST_BLOCKS, Skipped
    from kvtrie.sim.replay import open_manager, replay
    from kvtrie.sim.requests import block_requests

    skipped = Skipped() if given.lenient else None
    tiers = given.tier or [Tier("gpu", blocks=5859)]
    source = source_of(given)
    most = max(MOST_BLOCKS, *(tier.blocks or 0 for tier in tiers))
    stream = block_requests(source, given.block_tokens, skipped, most)
    several = "," in given.policy
    names = ("policy", "structure", "block_tokens", "load", "ends", "objective", "model", "points")
    settings = {"trace": str(given.trace), **{name: getattr(given, name) for name in names}}
    for name in ("rooms", "plot"):
        if getattr(given, name) is not None and not several:
            raise ConfigError(f"--{name} goes with several policies, as --policy learned,retention")
    # A report shows some of all requests, and ends are known only after all requests.
    whole = given.save is not None or several or given.ends
    requests = list(stream) if whole else stream
    if given.ends and all(request.session is None for request in requests):
        raise ConfigError(f"--ends: no request of {given.trace} names its session")
    if several and isinstance(requests, list):
        from kvtrie.cli.rooms import compare

        status = _status(skipped)
        compare(given, requests, settings)
        return status
    model, resume = model_of(given, tiers, given.block_tokens)
    manager = open_manager(
        tiers,
        model=model,
        resume=resume,
        policy=given.policy,
        structure=given.structure,
        block_tokens=given.block_tokens,
        eviction_log=given.evictions,
        objective=given.objective,
    )
    played = replay(
        watched(requests, "Replaying", quiet=given.json),
        manager,
        load=given.load,
        block_tokens=given.block_tokens,
        ends=given.ends,
    )
    status = _status(skipped)
    title = f"{given.trace.name}, {given.policy}, {given.structure}"
    if given.save is not None and isinstance(requests, list):
        _save(given.save, manager, title, requests)
    if skipped is not None:
        settings["skipped_lines"] = skipped.lines
        settings["kept_lines"] = skipped.parsed
    last = manager.evictions()
    if given.json:
        sys.stdout.write(_json(settings, played, last if given.evictions else None))
        return status
    left = f"\n{skipped.lines} lines were left out\n" if skipped and skipped.lines else ""
    sys.stdout.write(_text(title, played) + left + _evictions(manager, last))
    return status


def _save(path: Path, manager: BlockManager, title: str, requests: Sequence[TraceRequest]) -> None:
    """Write a report with some of the requests on its map, the last request included."""
    from kvtrie.demo.report import capture, write_report

    step = max(1, len(requests) // _ON_THE_MAP)
    some = range(len(requests) - 1, -1, -step)[:_ON_THE_MAP][::-1]
    named = {f"request {at + 1}": requests[at].blocks.tolist() for at in some}
    write_report(path, capture(manager, title, named, manager.stats().now))


def model_of(
    given: argparse.Namespace, tiers: Sequence[Tier], block_tokens: int
) -> tuple[ModelShape, ResumePoints | None]:
    """Return the shape of the model, and its resumable borders.

    Raises:
        ConfigError: an unknown name, bytes without a model, or invalid points.
    """
    from kvtrie.settings.resume import ResumePoints
    from kvtrie.sim.models import model_named, without_groups
    from kvtrie.sim.replay import SHAPE

    if given.model is None:
        if given.groups == "off" or given.points is not None:
            raise ConfigError("--groups and --points go with --model")
        if any(tier.bytes is not None for tier in tiers):
            raise ConfigError("--tier with a room in bytes wants --model, which has their number")
        return SHAPE, None
    model = model_named(given.model)
    points = 1 if given.points is None else given.points
    if points < 1:
        raise ConfigError(f"--points is {points}, at least 1 wanted")
    if given.groups == "off":
        return without_groups(model), None
    if not model.groups:
        return model, None
    every = points >= block_tokens
    return model, ResumePoints(every=points) if every else ResumePoints(newest=points)


def _status(skipped: Skipped | None) -> int:
    return 0 if skipped is None else lenient_status(skipped.lines, skipped.parsed)


def _json(settings: dict[str, Any], played: Replayed, last: list[Eviction] | None) -> str:
    figures = {**settings, **dataclasses.asdict(played)}
    figures |= {"hit_rate": played.hit_rate, "bound": played.bound}
    figures |= {"cost_rate": played.cost_rate, "evictions": played.evictions}
    figures |= {"token_rate": played.token_rate}
    if last is not None:
        figures["last_evictions"] = [
            {
                **{name: getattr(entry, name) for name in _COLUMNS},
                "tenant": entry.tenant.hex(),
                "value": _finite(entry.value),
                "next_value": _finite(entry.next_value),
            }
            for entry in last
        ]
    return json.dumps(figures) + "\n"


def _finite(value: float | None) -> float | None:
    """Replace infinity by None for JSON: a block used just now has no finite value."""
    return value if value is not None and math.isfinite(value) else None


def _evictions(manager: BlockManager, last: list[Eviction]) -> str:
    """Return the log as a table, a line per eviction."""
    if not last:
        return ""
    heads = ("block", "position", "tier", "reason", "cause", "uses", "idle s", "cost", "value")
    text = "\n" + f"{'at s':>12}" + "".join(f"{head:>12}" for head in (*heads, "next value")) + "\n"
    for entry in last:
        tier = manager.tiers[entry.tier].kind
        cells = (f"{entry.block:#x}", entry.position, tier, entry.reason, entry.cause, entry.uses)
        following = "-" if entry.next_value is None else f"{entry.next_value:.3g}"
        figures = (f"{entry.idle / 1e9:.3f}", f"{entry.cost:.4g}", f"{entry.value:.3g}", following)
        text += f"{entry.at / 1e9:12.3f}" + "".join(f"{cell:>12}" for cell in (*cells, *figures))
        text += "\n"
    return text


def _text(title: str, played: Replayed) -> str:
    refused = f"; {played.refused} requests did not fit" if played.refused else ""
    heads = ("blocks", "hits", "clean", "demoted", "dropped")
    text = (
        f"{title}\n"
        f"{played.requests} requests, {played.blocks} blocks, {played.tokens} tokens{refused}\n"
        f"prefix hits {played.hit_rate:.4f} ({played.hits} blocks); {played.recomputed} blocks "
        f"computed again inside a match; {played.waited_s:.1f} s waited for loads\n\n"
        f"{'tier':8}{''.join(f'{head:>10}' for head in heads)}{'hits/all':>10}\n"
    )
    for tier in played.tiers:
        counts = (tier.blocks, tier.hits, tier.clean, tier.demoted, tier.dropped)
        share = tier.hits / max(1, played.blocks)
        text += f"{tier.kind:8}{''.join(f'{count:10d}' for count in counts)}{share:10.4f}\n"
    return text + _grouped(played) + _lost(played)


def _grouped(played: Replayed) -> str:
    """Return the bytes by group of layers as text."""
    if not played.groups:
        return ""
    text = f"\n{'group':12}{'layers':>8}{'slot MiB':>12}{'held MiB':>12}{'released MiB':>14}\n"
    for group in played.groups:
        sizes = (group.slot_bytes, group.held_bytes, group.released_bytes)
        slot, held, released = (size / 2**20 for size in sizes)
        text += f"{group.kind:12}{group.layers:8d}{slot:12.2f}{held:12.1f}{released:14.1f}\n"
    return text


def _lost(played: Replayed) -> str:
    """Return misses by cause, and hits by turn, as text."""
    new = played.blocks - played.hits - played.evicted - (played.diverged or 0)
    diverged = "" if played.diverged is None else f"{played.diverged} where a session's prompt "
    diverged += "" if played.diverged is None else "had changed, "
    text = (
        f"\ncost saved {played.cost_rate:.4f}; with room for all prefix hits {played.bound:.4f}\n"
        f"not found: {played.evicted} blocks that had been evicted, {diverged}{new} new ones\n\n"
        f"{'turn':8}{'requests':>10}{'blocks':>10}{'hits':>10}{'hits/all':>10}\n"
    )
    last = played.turns[-1].turn if played.turns else 0
    for row in played.turns:
        turn = f"{row.turn}+" if row.turn == last == MOST_TURNS else str(row.turn)
        share = row.hits / max(1, row.blocks)
        text += f"{turn:8}{row.requests:10d}{row.blocks:10d}{row.hits:10d}{share:10.4f}\n"
    return text


COMMAND = ("play a trace of block hashes through a manager, without bytes", _arguments)
"""Help text of the command, and its function for arguments."""
