"""`kvtrie sim capacities`: hits of leaf-only LRU in each room, with Belady's bound."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kvtrie.cli.lenient import lenient_status
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.cli.sim.settings import add_settings, settings_of
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvtrie.sim.config import SimulationConfig

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
        help="number of capacities, from the smallest to one that finds all (default: 12)",
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
    from kvtrie.sim.readers.lines import Skipped

    if not 1 <= given.points <= _MOST_POINTS:
        raise ConfigError(f"--points is {given.points}, 1 to {_MOST_POINTS} wanted")
    config = settings_of(given)
    _check(config)
    skipped = Skipped()
    paths = list(paths_of(config, skipped))
    status = lenient_status(skipped.lines, skipped.parsed)
    curve = lru_curve(watched(paths, "Measuring"))
    block_gib = config.model.layers * config.model.layer_bytes(config.block_tokens) / _GIB
    points: list[dict[str, Any]] = [
        {
            "capacity": capacity,
            "gib": capacity * block_gib,
            "hits": curve.hits(capacity),
            "most_hits": most_hits(paths, capacity).hits,
        }
        for capacity in watched(_spaced(curve.least, len(curve.found) - 1, given.points), "Bounds")
    ]
    if given.csv is not None:
        write_csv(given.csv, points)
    if given.plot is not None:
        from kvtrie.sim.pictures import draw_hits

        shares = curve.found / max(1, curve.blocks)
        line = [(at * block_gib, float(shares[at])) for at in range(curve.least, len(shares))]
        bound = [(point["gib"], point["most_hits"] / max(1, curve.blocks)) for point in points]
        draw_hits(given.plot, config.trace.path.name, {"leaf-only LRU": line}, bound)
    if given.json:
        sys.stdout.write(json.dumps({"blocks": curve.blocks, "points": points}) + "\n")
    else:
        text = f"{config.trace.path.name}: {curve.blocks} blocks of prompts\n\n"
        text += f"{'blocks':>12}{'GiB':>12}{'LRU':>12}{'most':>12}\n"
        for point in points:
            shares = (point[name] / max(1, curve.blocks) for name in ("hits", "most_hits"))
            text += f"{point['capacity']:12d}{point['gib']:12.2f}"
            text += "".join(f"{share:12.4f}" for share in shares) + "\n"
        sys.stdout.write(text)
    return status


def _check(config: SimulationConfig) -> None:
    """The curve is that of one machine with one tier of leaf-only LRU, which does not batch."""
    wanted = {"policy": "lru", "structure": "leaf-only", "engine": "serial", "machines": 1}
    named = {"machines": "machines", "engine": "engine.kind"}
    for name, value in wanted.items():
        if (found := config.manager.get(name, value)) != value:
            key = named.get(name, f"manager.{name}")
            raise ConfigError(
                f"{key} is {found!r}: capacities are those of {value!r}; --set {key}={value}"
            )
    if len(config.tiers) != 1 or config.tiers[0].layer_slots:
        raise ConfigError(
            f"tiers has {len(config.tiers)} tiers: capacities are those of one without layer_slots"
        )


def _spaced(least: int, most: int, number: int) -> list[int]:
    """Capacities at equal ratios."""
    most = max(least, most)
    steps = max(1, number - 1)
    return sorted({round(least * (most / least) ** (at / steps)) for at in range(number)})


ACTION = ("hits of LRU with each capacity in one pass, beside Belady's bound", _arguments)
"""The help text of the action, and the function that adds its arguments."""
