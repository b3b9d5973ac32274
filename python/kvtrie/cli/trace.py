"""`kvtrie trace convert`: any readable trace in the compact form."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvtrie.cli.lenient import lenient_status
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.cli.replay import add_trace, source_of

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "write a trace as ranges of block ids, which are read fastest"
    convert = actions.add_parser("convert", help=summary, description=summary)
    add_trace(convert)
    convert.add_argument(
        "out",
        type=output_file,
        metavar="OUT",
        help="the file to write, compressed if its name ends in .gz or .zst",
    )
    convert.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a hash, or of a block of a trace without hashes (default: %(default)s)",
    )
    convert.set_defaults(run=_convert)


def _convert(given: argparse.Namespace) -> int:
    from kvtrie.settings.argument import whole
    from kvtrie.sim.readers.lines import MOST, Skipped
    from kvtrie.sim.requests import block_requests
    from kvtrie.sim.trace import write_trace

    size = whole("--block-tokens", given.block_tokens, 1, MOST // 2)
    source, skipped = source_of(given), Skipped() if given.lenient else None
    requests = block_requests(source, size, skipped, waits=True, renumber=True)
    written = write_trace(given.out, watched(requests, "Converting"))
    left = f"; {skipped.lines} lines were left out" if skipped and skipped.lines else ""
    sys.stderr.write(f"{given.out}: {written} requests, a hash is {size} tokens{left}\n")
    return 0 if skipped is None else lenient_status(skipped.lines, skipped.parsed)


COMMAND = ("work on traces of requests", _arguments)
"""Help text of the command, and its function for arguments."""
