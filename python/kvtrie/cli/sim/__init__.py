"""`kvtrie sim`: a trace through simulated machines, with a file per action."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.cli.sim import calibrate, capacities, run, size, sweep

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]

_ACTIONS = {
    "run": run.ACTION,
    "sweep": sweep.SWEEP,
    "compare": sweep.COMPARE,
    "size": size.ACTION,
    "calibrate": calibrate.ACTION,
    "capacities": capacities.ACTION,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (summary, arguments) in _ACTIONS.items():
        arguments(actions.add_parser(name, help=summary, description=summary))


COMMAND = ("play a trace through simulated machines", _arguments)
"""Help text of the command, and its function for arguments."""
