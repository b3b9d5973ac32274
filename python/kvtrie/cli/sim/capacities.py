"""`kvtrie sim capacities`: hits with each capacity of the last tier, with Belady's bound."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kvtrie.cli.lenient import lenient_status
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.cli.sim.settings import add_settings, settings_of
from kvtrie.errors import ConfigError
from kvtrie.sim.readers.lines import Skipped

if TYPE_CHECKING:
    import argparse

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.sampled import Sampling

__all__ = ["ACTION"]

_POINTS = 12
_MOST_POINTS = 1000
_GIB = 2**30


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument(
        "--points",
        type=int,
        default=_POINTS,
        metavar="N",
        help="number of capacities, from the smallest to room for all blocks (default: 12)",
    )
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the points, a row each"
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="PICTURE", help="draw hits over GiB (PNG, SVG or PDF)"
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.capacities import lru_curve, paths_of
    from kvtrie.sim.headline import write_csv
    from kvtrie.sim.offline import most_hits

    if not 1 <= given.points <= _MOST_POINTS:
        raise ConfigError(f"--points is {given.points}, 1 to {_MOST_POINTS} wanted")
    config = settings_of(given)
    _check(config)
    skipped = Skipped()
    paths = list(paths_of(config, skipped))
    status = lenient_status(skipped.lines, skipped.parsed)
    curve = lru_curve(watched(paths, "Measuring"))
    block_gib = config.model.layers * config.model.layer_bytes(config.block_tokens) / _GIB
    exact = config.manager["policy"] == "lru" and len(config.tiers) == 1
    exact = exact and config.manager.get("structure", "leaf-only") == "leaf-only"
    sampling = None if exact else _sampling(config)
    above = sum(tier.room(config.model, config.block_tokens) for tier in config.tiers[:-1])
    points: list[dict[str, Any]] = []
    for capacity in watched(_spaced(curve.least, len(curve.found) - 1, given.points), "Bounds"):
        most = most_hits(paths, above + capacity).hits
        point: dict[str, Any] = {"capacity": capacity, "gib": capacity * block_gib}
        if sampling is None:
            point["hits"] = curve.hits(capacity)
        else:
            found = sampling.point(capacity)
            point |= {"hits": min(most, round(found.share * curve.blocks))}
            point |= {"error": found.error, "one_in": found.one_in}
        points.append(point | {"most_hits": most})
    if given.csv is not None:
        write_csv(given.csv, points)
    if given.plot is not None:
        from kvtrie.sim.pictures import draw_hits

        shares = curve.found / max(1, curve.blocks)
        line = [(at * block_gib, float(shares[at])) for at in range(curve.least, len(shares))]
        lines = {"leaf-only LRU": line}
        if sampling is not None:
            given_line = [(one["gib"], one["hits"] / max(1, curve.blocks)) for one in points]
            lines = {f"{config.manager['policy']}, sampled": given_line}
        bound = [(point["gib"], point["most_hits"] / max(1, curve.blocks)) for point in points]
        draw_hits(given.plot, config.trace.path.name, lines, bound)
    if given.json:
        sys.stdout.write(json.dumps({"blocks": curve.blocks, "points": points}) + "\n")
    else:
        head = f"{config.trace.path.name}: {curve.blocks} blocks of prompts\n\n"
        sys.stdout.write(head + _table(points, curve.blocks, config.manager["policy"]))
    return status


def _table(points: list[dict[str, Any]], blocks: int, policy: object) -> str:
    """Return the points as text, sampled points with their error and the share of sessions."""
    sampled = "error" in points[0]
    name = f"{policy}" if sampled else "LRU"
    text = f"{'blocks':>12}{'GiB':>12}{name:>12}{'most':>12}"
    text += f"{'error':>12}{'sessions':>12}\n" if sampled else "\n"
    for point in points:
        shares = (point[one] / max(1, blocks) for one in ("hits", "most_hits"))
        text += f"{point['capacity']:12d}{point['gib']:12.2f}"
        text += "".join(f"{share:12.4f}" for share in shares)
        if sampled:
            text += f"{point['error']:12.4f}{'1 in {}'.format(point['one_in']):>12}"
        text += "\n"
    return text


def _sampling(config: SimulationConfig) -> Sampling:
    from kvtrie.sim.requests import block_requests
    from kvtrie.sim.sampled import Sampling

    named = ("policy", "structure", "objective")
    more = {name: config.manager[name] for name in named if name in config.manager}
    skipped = Skipped() if config.trace.lenient else None
    size = config.block_tokens
    requests = list(block_requests(config.trace, size, skipped, config.most_blocks))
    return Sampling(requests, config.tiers, block_tokens=size, model=config.model, **more)


def _check(config: SimulationConfig) -> None:
    """Refuse settings without a curve: only a single machine without batches has a curve."""
    wanted = {"engine": "serial", "machines": 1}
    named = {"machines": "machines", "engine": "engine.kind"}
    for name, value in wanted.items():
        if (found := config.manager.get(name, value)) != value:
            key = named.get(name, f"manager.{name}")
            raise ConfigError(
                f"{key} is {found!r}: capacities are those of {value!r}; --set {key}={value}"
            )
    if any(tier.layer_slots for tier in config.tiers):
        raise ConfigError("a tier has layer_slots: capacities are those of tiers without them")


def _spaced(least: int, most: int, number: int) -> list[int]:
    """Return capacities at equal ratios."""
    most = max(least, most)
    steps = max(1, number - 1)
    return sorted({round(least * (most / least) ** (at / steps)) for at in range(number)})


ACTION = ("hits with each capacity, of LRU in one pass, with Belady's bound", _arguments)
"""Help text of the action, and its function for arguments."""
