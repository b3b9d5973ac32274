"""`kvtrie sim run`: a trace through simulated machines, and its figures as text or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvtrie.sim.config import SimulationConfig

__all__ = ["COMMAND"]

_NS_PER_MS = 1e6


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("run",), metavar="ACTION", help="run: play the trace once"
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the settings, a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a setting, as tiers.0.blocks=9; up to any number of times",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--requests", type=Path, metavar="FILE", help="write a JSON line for each request"
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.config import read_config
    from kvtrie.sim.run import run_config

    config = read_config(given.config, given.set)
    if given.requests is None:
        figures = run_config(config)
    else:
        figures = _written(given.requests, lambda tell: run_config(config, tell))
    sys.stdout.write(json.dumps(figures) + "\n" if given.json else _text(config, figures))
    return 0


def _written(
    path: Path, run: Callable[[Callable[[dict[str, Any]], object]], dict[str, Any]]
) -> dict[str, Any]:
    """Write what a run tells as JSON lines; a run that fails leaves no file behind."""
    part = path.with_name(path.name + ".part")
    try:
        try:
            with part.open("w", encoding="utf-8") as file:
                figures = run(lambda line: file.write(json.dumps(line) + "\n"))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return figures


def _text(config: SimulationConfig, figures: dict[str, Any]) -> str:
    """The figures as a person reads them."""
    asked, found = figures["input_tokens"], sum(figures["hit_tokens"].values())
    text = (
        f"{config.trace.path.name}: {figures['requests']} requests, {figures['refused']} refused, "
        f"{asked} prompt tokens, {found / max(1, asked):.4f} of them found\n\n"
        f"{'ms':8}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}\n"
    )
    for name in ("ttft", "tpot", "e2e"):
        spread = figures[f"{name}_ns"]
        if spread is not None:
            cells = (f"{value / _NS_PER_MS:12.3f}" for value in spread.values())
            text += f"{name:8}{''.join(cells)}\n"
    text += f"\n{'tier':8}{'blocks':>12}{'hits':>12}{'clean':>12}{'demoted':>12}{'dropped':>12}\n"
    for tier in figures["tiers"]:
        names = ("blocks", "hits", "clean", "demoted", "dropped")
        text += f"{tier['kind']:8}{''.join(f'{tier[name]:12d}' for name in names)}\n"
    text += f"\n{'lane':16}{'MB':>12}{'busy ms':>12}\n"
    for name, lane in figures["lanes"].items():
        text += f"{name:16}{lane['bytes'] / 1e6:12.1f}{lane['busy_ns'] / _NS_PER_MS:12.1f}\n"
    return f"{text}\n{figures['wall_s']:.2f} s\n"


COMMAND = ("play a trace through simulated machines", _arguments)
"""The help text of the command, and the function that adds its arguments."""
