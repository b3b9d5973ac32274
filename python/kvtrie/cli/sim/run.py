"""`kvtrie sim run`: a trace through simulated machines, and its figures as text or JSON."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from kvtrie.cli.lenient import status_of
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import lines_in, watched
from kvtrie.cli.replay import add_model, model_of
from kvtrie.cli.sim.settings import add_settings, changes_in, settings_of
from kvtrie.errors import ConfigError
from kvtrie.output import writing_text
from kvtrie.settings.argument import whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from kvtrie._kvtrie import Simulation
    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.readers.rows import AnyRow

__all__ = ["ACTION"]

_NS_PER_MS = 1e6
_NS_PER_S = 1e9
_SAMPLE_NS = 1_000_000_000
_MOST_BEST = 2**20


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    add_model(parser)
    parser.add_argument(
        "--requests", type=output_file, metavar="FILE", help="write a JSON line for each request"
    )
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the figures in a row"
    )
    parser.add_argument(
        "--perfetto",
        type=output_file,
        metavar="FILE",
        help="write steps, transmissions and requests for ui.perfetto.dev",
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="PICTURE", help="draw tiers over time (PNG, SVG or PDF)"
    )
    parser.add_argument(
        "--sample-ns",
        type=int,
        default=_SAMPLE_NS,
        metavar="N",
        help="for --plot: time between two samples (default: a second)",
    )
    parser.add_argument(
        "--decisions",
        type=output_file,
        metavar="FILE",
        help="write a JSON line for each routed request",
    )
    parser.add_argument(
        "--best",
        type=int,
        default=0,
        metavar="K",
        help="for --decisions: the K best of the remaining machines (0)",
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.run import open_simulation

    if given.sample_ns < 1:
        raise ConfigError(f"--sample-ns is {given.sample_ns}, at least 1 wanted")
    config, best = _config(given), whole("--best", given.best, 0, _MOST_BEST)
    if best and given.decisions is None:
        raise ConfigError(f"--best is {best}, but --decisions names no file")
    simulation = open_simulation(config)
    sampled = given.sample_ns if given.plot else 0
    simulation.watch(spans=given.perfetto is not None, sample_ns=sampled)
    lines: list[dict[str, Any]] = []
    on_line = None if given.perfetto is None else lines.append
    begun = perf_counter()
    with _lines_to(given.requests) as on_request, _lines_to(given.decisions) as on_decision:
        figures = _played(config, simulation, _both(on_request, on_line), on_decision, best)
    seconds = perf_counter() - begun
    status = status_of(figures)
    if given.csv is not None:
        from kvtrie.sim.headline import row_of, write_csv

        write_csv(given.csv, [row_of({}, figures)])
    if given.perfetto is not None:
        from kvtrie.sim.perfetto import write_perfetto

        write_perfetto(given.perfetto, simulation, lines)
    if given.plot is not None:
        _draw(given.plot, config, simulation)
    sys.stdout.write(json.dumps(figures) + "\n" if given.json else _text(config, figures, seconds))
    return status


def _config(given: argparse.Namespace) -> SimulationConfig:
    """Return the settings, with the named model if there is one."""
    from kvtrie.sim.config import read_config

    config = settings_of(given)
    if given.model is None and given.groups == "on" and given.points is None:
        return config
    model, resume = model_of(given, config.tiers, config.block_tokens)
    return read_config(given.config, changes_in(given), model=model, resume=resume)


_LineSink: TypeAlias = "Callable[[dict[str, Any]], object]"


def _both(one: _LineSink | None, other: _LineSink | None) -> _LineSink | None:
    if one is None or other is None:
        return one or other
    return lambda line: (one(line), other(line))


def _played(
    config: SimulationConfig,
    simulation: Simulation,
    on_line: _LineSink | None,
    on_decision: _LineSink | None,
    best: int,
) -> dict[str, Any]:
    """Run with a bar on the terminal, with the time left by the trace's number of requests."""
    from kvtrie.sim.run import run_config

    def watch(requests: Iterable[AnyRow]) -> Iterable[AnyRow]:
        made = config.trace.generator
        total = lines_in(config.trace.path) if made is None else made.requests
        return watched(requests, "Simulating", total=total)

    return run_config(
        config, on_line, watch=watch, simulation=simulation, on_decision=on_decision, best=best
    )


def _draw(path: Path, config: SimulationConfig, simulation: Simulation) -> None:
    from kvtrie.sim.pictures import draw_tiers

    kinds = [tier.kind for tier in config.tiers]
    draw_tiers(path, config.trace.path.name, kinds, config.rooms(), simulation.samples())


@contextmanager
def _lines_to(path: Path | None) -> Generator[_LineSink | None]:
    """Yield a writer of JSON lines to a named file, or None. A failed run writes no file."""
    if path is None:
        yield None
        return
    with writing_text(path) as file:
        yield lambda line: file.write(json.dumps(line) + "\n")


def _text(config: SimulationConfig, figures: dict[str, Any], seconds: float) -> str:
    """Return the figures as readable text, with the duration of the run in seconds."""
    prompt, found = figures["input_tokens"], sum(figures["hit_tokens"].values())
    text = (
        f"{config.trace.path.name}: {figures['requests']} requests, {figures['refused']} refused, "
        f"{prompt} prompt tokens, {found / max(1, prompt):.4f} of them found\n\n"
        f"{'ms':8}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}\n"
    )
    for name in ("ttft", "tpot", "e2e"):
        spread = figures[f"{name}_ns"]
        if spread is not None:
            cells = (f"{value / _NS_PER_MS:12.3f}" for value in spread.values())
            text += f"{name:8}{''.join(cells)}\n"
    names = ("blocks", "hits", "hit_tokens", "saved_s", "clean", "demoted", "dropped")
    heads = ("blocks", "hits", "tokens hit", "saved s", "clean", "demoted", "dropped")
    text += f"\n{'tier':8}{''.join(f'{head:>12}' for head in heads)}\n"
    for tier in figures["tiers"]:
        row = {**tier, "saved_s": f"{tier['saved_ns'] / _NS_PER_S:.1f}"}
        text += f"{tier['kind']:8}{''.join(f'{row[name]:>12}' for name in names)}\n"
    text += f"\n{'lane':16}{'MB':>12}{'busy ms':>12}{'use':>12}{'waited ms':>12}\n"
    for name, lane in figures["lanes"].items():
        text += f"{name:16}{lane['bytes'] / 1e6:12.1f}{lane['busy_ns'] / _NS_PER_MS:12.1f}"
        text += f"{lane['use']:12.4f}{lane['waited_ns'] / _NS_PER_MS:12.1f}\n"
    if figures.get("skipped_lines"):
        text += f"\n{figures['skipped_lines']} lines of the trace were left out\n"
    return f"{text}\n{_verdict(figures)}{seconds:.2f} s\n"


def _verdict(figures: dict[str, Any]) -> str:
    """Return goodput, cost and a warning if requests piled up."""
    text = ""
    if (good := figures["goodput"]) is not None:
        text += f"goodput {good['per_s']:.3f} requests/s: {good['share']:.4f} met the goals\n"
    if (cost := figures["cost"]) is not None:
        text += (
            f"{cost['per_hour']:.2f} per hour, {cost['run']:.4f} for the run, "
            f"{cost['per_million_tokens']:.4f} per million tokens\n"
        )
    if figures["saturated"]:
        waiting = figures["waiting"]
        text += (
            f"saturated: {waiting['half']} requests wait half way to the last arrival, "
            f"{waiting['end']} at it\n"
        )
    return text


ACTION = ("play the trace once", _arguments)
"""Help text of the action, and its function for arguments."""
