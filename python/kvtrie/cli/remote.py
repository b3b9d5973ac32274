"""`kvtrie remote check` and `gc`: the arguments, and the results as text or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError, TransferError
from kvtrie.output import write_output
from kvtrie.printable import MESSAGE, printable

if TYPE_CHECKING:
    import argparse

    from kvtrie.tiers.remote.check import Report

__all__ = ["COMMAND"]

_BLOCKS = 100_000  # of a simulated store, for the user to change


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "remove expired blocks and stale staging files of a folder:"
    gc = actions.add_parser("gc", help=summary, description=summary)
    gc.add_argument("url", metavar="URL", help="folder:/path?ttl=SECONDS, as the tier has it")
    gc.add_argument("--json", action="store_true", help="print a JSON document")
    gc.set_defaults(run=_gc)
    summary = "try each operation of a store, and time it next to a plain client"
    check = actions.add_parser("check", help=summary, description=summary)
    check.add_argument("url", metavar="URL", help="the store, as the tier has it")
    check.add_argument("--json", action="store_true", help="print a JSON document")
    check.add_argument(
        "--out",
        type=output_file,
        default=Path("kvtrie-remote.toml"),
        metavar="FILE",
        help="file for the lanes, for `kvtrie sim`: lanes = {path=FILE}",
    )
    check.set_defaults(run=_check)


def _check(given: argparse.Namespace) -> int:
    from kvtrie.tiers.remote.check import check_store
    from kvtrie.tiers.remote.url import RemoteUrl

    url = RemoteUrl.parse("URL", given.url)
    try:
        report = check_store(url)
    except TransferError as error:
        raise ConfigError(f"{url} is unreachable: {error}") from error
    lanes = report.lanes()
    if report.speeds:
        rows = [
            f'[lanes."{name}"]\n' + "".join(f"{key} = {value}\n" for key, value in lane.items())
            for name, lane in lanes.items()
        ]
        write_output(given.out, "\n".join(rows))
    if given.json:
        document = {**asdict(report), "ok": report.ok, "lanes": lanes}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(_text(report))
        if report.speeds:
            sys.stdout.write(f"\nLanes written to {given.out}. {_simulated(given.out)}")
    return 0 if report.ok else 1


def _text(report: Report) -> str:
    lines = [report.url, ""]
    lines += [
        f"{'ok' if step.ok else 'FAILED':8}{step.name:20}{printable(step.detail, MESSAGE)}"
        for step in report.steps
    ]
    if report.speeds:
        lines += ["", f"{'block':>12}{'put':>22}{'get':>22}{'plain client':>22}"]
    for speed in report.speeds:
        times = (speed.put_ns, speed.get_ns, speed.plain_ns)
        cells = "".join(f"{_rate(speed.bytes, each):>22}" for each in times)
        lines.append(f"{speed.bytes / 2**20:>8.2f} MiB{cells}")
    return "\n".join(lines) + "\n"


def _simulated(lanes: Path) -> str:
    """Return the settings for this store in `kvtrie sim`."""
    from kvtrie.sim.config.document import toml_of

    tables = {"lanes": {"path": str(lanes)}, "remote": {"shared": True, "blocks": _BLOCKS}}
    lines = [f"{name} = {toml_of(table)}\n" for name, table in tables.items()]
    return f"Settings of kvtrie sim for this store:\n{''.join(lines)}"


def _rate(size: int, nanoseconds: float | None) -> str:
    if nanoseconds is None:
        return "-"
    return f"{nanoseconds / 1e6:.2f} ms {size / nanoseconds * 1000:.0f} MB/s"


def _gc(given: argparse.Namespace) -> int:
    from kvtrie.tiers.remote.folder import collect
    from kvtrie.tiers.remote.url import RemoteUrl

    url = RemoteUrl.parse("URL", given.url)
    if url.scheme != "folder":
        raise ConfigError(f"{url}: only folder: has files to remove; other stores expire values")
    removed = collect(url)
    if given.json:
        sys.stdout.write(json.dumps({"url": str(url), **asdict(removed)}) + "\n")
    else:
        sys.stdout.write(
            f"{removed.expired} expired blocks and {removed.staged} staging files removed, "
            f"{removed.bytes} bytes; {removed.kept} blocks kept\n"
        )
    return 0


COMMAND = ("look after a shared store", _arguments)
"""Help text of the command, and its function for arguments."""
