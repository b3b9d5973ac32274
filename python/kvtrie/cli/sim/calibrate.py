"""`kvtrie sim calibrate`: settings fitted to measured times, as TOML, text or JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.lenient import lenient_status
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import counting
from kvtrie.cli.sim.settings import add_settings, changes_in
from kvtrie.output import write_output

if TYPE_CHECKING:
    import argparse

__all__ = ["ACTION"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument(
        "--seen",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with arrival_ns, first_token_ns and end_ns, a line per request",
    )
    parser.add_argument(
        "--fit",
        action="append",
        metavar="KEY",
        help="a positive setting of the file to fit, repeatable (default: the settings of an "
        "affine cost, and bandwidth and latency of each used lane)",
    )
    parser.add_argument(
        "--write",
        type=output_file,
        metavar="FILE",
        help="write the fitted tables, as TOML",
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.calibrate import calibrate, read_seen, start_of
    from kvtrie.sim.config.document import toml_of, value_at
    from kvtrie.sim.grid import check, variation
    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.requests import trace_requests

    make = variation(given.config, changes_in(given), "--fit")
    begin = make({})
    check([begin.config])
    skipped = Skipped()
    if begin.config.trace.lenient:
        trace = begin.config.trace, begin.config.block_tokens
        for _ in trace_requests(*trace, skipped, begin.config.most_blocks):
            pass
    status = lenient_status(skipped.lines, skipped.parsed)
    seen = read_seen(given.seen)
    if given.fit:
        start = {key: value_at(begin.document, key, f"--fit {key}") for key in given.fit}
    else:
        start = start_of(begin.config)
    with counting("Simulating, runs:") as on_run:
        fit = calibrate(make, start, seen, on_run)
    if given.write is not None:
        document = make(fit.values).document
        tables = dict.fromkeys(key.split(".")[0] for key in fit.values)
        text = "".join(f"{table} = {toml_of(document[table])}\n" for table in tables)
        write_output(given.write, text)
    if given.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(fit)) + "\n")
        return status
    text = "".join(f"{key} = {value:.6g}\n" for key, value in fit.values.items())
    text += f"\n{'error, %':12}{'before':>12}{'after':>12}\n"
    for name in fit.after:
        text += f"{name:12}{fit.before[name]:12.2f}{fit.after[name]:12.2f}\n"
    sys.stdout.write(f"{text}\nover {fit.left_out} requests; {fit.fitted} others were fitted\n")
    return status


ACTION = ("fit costs and lanes to the times of a real run", _arguments)
"""Help text of the action, and its function for arguments."""
