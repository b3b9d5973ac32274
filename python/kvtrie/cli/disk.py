"""`kvtrie disk ls`, `verify` and `gc`: the arguments, and the results as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvtrie.cli.progress import watched
from kvtrie.errors import KvtrieError
from kvtrie.printable import MESSAGE, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtrie.cli.folder import Cleaned, Finding, Look, Row, Verified

__all__ = ["COMMAND"]

_Result = TypeVar("_Result")

_DAMAGED = 1
_UNREADABLE = 2
_NS = 1_000_000_000
_DAY = 24 * 60 * 60 * _NS
_SPANS = (("d", _DAY), ("h", 60 * 60 * _NS), ("min", 60 * _NS), ("s", _NS))
_STEP = 1024
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_LEGIBLE = 16


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made: dict[str, argparse.ArgumentParser] = {}
    for name, (summary, run, more) in _ACTIONS.items():
        made[name] = actions.add_parser(name, help=summary, description=summary, epilog=more)
        made[name].add_argument(
            "folder", type=Path, metavar="FOLDER", help="path of a disk tier or of a kept host tier"
        )
        made[name].add_argument("--json", action="store_true", help="print a JSON document")
        made[name].set_defaults(run=run)
    made["ls"].add_argument("--blocks", action="store_true", help="and every block in them")
    made["gc"].add_argument(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="remove stores without a used block for this time",
    )


def _days(text: str) -> int:
    """Return the nanoseconds of a number of days."""
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise argparse.ArgumentTypeError(f"a number of days wanted, at least 0, not {text!r}")
    return int(days * _DAY)


def _ls(given: argparse.Namespace) -> int:
    from kvtrie.cli.folder import look, stores

    wall = time.time_ns()
    found, unreadable = stores(given.folder)
    looks = _each(found, lambda store: look(store, wall), unreadable)
    document = [_look_figures(seen, blocks=given.blocks) for seen in looks]
    _print(given, document, lambda: _listing(looks, blocks=given.blocks), unreadable)
    return _UNREADABLE if unreadable else 0


def _verify(given: argparse.Namespace) -> int:
    from kvtrie.cli.folder import stores, verify

    wall = time.time_ns()
    found, unreadable = stores(given.folder)

    def one(store: Path) -> Verified:
        def watch(rows: Sequence[Row]) -> Iterable[Row]:
            return watched(rows, f"Verifying {store.name}", quiet=given.json)

        return verify(store, wall, watch)

    verified = _each(found, one, unreadable)
    document = [_verified_figures(result) for result in verified]
    _print(given, document, lambda: "\n".join(map(_verdict, verified)), unreadable)
    if unreadable:
        return _UNREADABLE
    return _DAMAGED if any(result.findings for result in verified) else 0


def _gc(given: argparse.Namespace) -> int:
    from kvtrie.cli.folder import clean, finish_removals, stores
    from kvtrie.cli.parts import parts

    wall = time.time_ns()
    found, unreadable = stores(given.folder)
    known = parts(found, wall)
    left_over = finish_removals(given.folder)
    cleaned = _each(
        watched(found, "Cleaning", quiet=given.json),
        lambda store: clean(store, wall, given.older_than, known.get(store)),
        unreadable,
    )
    total = left_over + sum(result.freed for result in cleaned)
    document = [{**asdict(result), "store": str(result.store)} for result in cleaned]

    def text() -> str:
        lines = [f"{result.store}: {_outcome(result)}" for result in cleaned]
        return "\n".join([*lines, f"{_size(total)} freed ({total} bytes)"])

    _print(given, document, text, unreadable, freed=total)
    return _UNREADABLE if unreadable else 0


def _each(
    found: Iterable[Path], work: Callable[[Path], _Result], unreadable: list[str]
) -> list[_Result]:
    """Return the result of the work per store, and append each failure to `unreadable`."""
    results: list[_Result] = []
    for store in found:
        try:
            results.append(work(store))
        except KvtrieError as error:
            unreadable.append(str(error))
    return results


def _print(
    given: argparse.Namespace,
    document: list[dict[str, Any]],
    text: Callable[[], str],
    unreadable: list[str],
    **more: int,
) -> None:
    if given.json:
        whole = {"folder": str(given.folder), "stores": document, "unreadable": unreadable, **more}
        sys.stdout.write(json.dumps(whole) + "\n")
    elif document:
        sys.stdout.write(text() + "\n")
    for why in unreadable:
        sys.stderr.write(f"kvtrie disk {given.action}: {printable(why, MESSAGE)}\n")


def _look_figures(seen: Look, *, blocks: bool) -> dict[str, Any]:
    ages = [row[4] for row in seen.rows]
    figures: dict[str, Any] = {
        "store": str(seen.store),
        "about": _meaning(seen.about),
        "blocks": len(seen.rows),
        "slots": seen.slots,
        "bytes": seen.bytes,
        "read_only": seen.read_only,
        "youngest_s": min(ages) / _NS if ages else None,
        "oldest_s": max(ages) / _NS if ages else None,
    }
    if blocks:
        figures["rows"] = [
            {
                "slot": slot,
                "key": key.hex(),
                "layers": [lo, hi],
                "age_s": age / _NS,
                "uses": uses,
                "rooted": rooted,
            }
            for slot, key, lo, hi, age, uses, rooted in seen.rows
        ]
    return figures


def _listing(looks: Sequence[Look], *, blocks: bool) -> str:
    heads = ("store", "blocks", "slots", "on disk", "youngest", "oldest")
    lines = ["{:16}  {:>9} {:>9} {:>10} {:>9} {:>9}".format(*heads)]
    for seen in looks:
        ages = [row[4] for row in seen.rows]
        lines.append(
            f"{seen.store.name:16}  {len(seen.rows):9d} {seen.slots:9d} {_size(seen.bytes):>10} "
            f"{_age(ages, min):>9} {_age(ages, max):>9}"
        )
        lines.append(f"    {printable(_words(seen.about), MESSAGE)}")
        lines.append(f"    {'read-only: ' + seen.read_only if seen.read_only else 'free to write'}")
        if blocks and seen.rows:
            lines.append(f"    {'slot':>9}  {'key':16} {'layers':>9} {'age':>9} {'uses':>9}  path")
        for slot, key, lo, hi, age, uses, rooted in seen.rows if blocks else ():
            layers, path = f"{lo}..{hi}", "whole" if rooted else "broken"
            lines.append(
                f"    {slot:9d}  {_name(key)} {layers:>9} {_age([age], min):>9} {uses:9d}  {path}"
            )
    return "\n".join(lines)


def _verified_figures(result: Verified) -> dict[str, Any]:
    return {
        "store": str(result.store),
        "blocks": result.blocks,
        "read_only": result.read_only,
        "findings": [
            {
                "slot": finding.slot,
                "key": None if finding.key is None else finding.key.hex(),
                "reason": finding.reason,
                "removed": finding.removed,
            }
            for finding in result.findings
        ],
    }


def _verdict(result: Verified) -> str:
    found, count = result.findings, len(result.findings)
    lines = [f"{result.store}: {result.blocks} blocks read, {count} findings"]
    if not found:
        return lines[0]
    lines.append(f"    {'slot':>9}  {'key':{_LEGIBLE}}  reason")
    lines += map(_finding, found)
    removed = sum(finding.removed for finding in found)
    if result.read_only is not None:
        lines.append(f"    nothing was removed: {result.read_only}")
    elif removed == count:
        lines.append(f"    {removed} removed")
    else:
        lines.append(f"    {removed} removed, {count - removed} left: the device failed")
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    slot = "-" if finding.slot is None else finding.slot
    key = "-" if finding.key is None else _name(finding.key)
    return f"    {slot:>9}  {key:{_LEGIBLE}}  {printable(finding.reason, MESSAGE)}"


def _outcome(result: Cleaned) -> str:
    if result.read_only is not None:
        return f"left alone: {result.read_only}"
    return f"{'removed, ' if result.removed else ''}{_size(result.freed)} freed"


def _meaning(about: str) -> object:
    """Return a store's description, parsed if it is JSON."""
    try:
        return json.loads(about)
    except (ValueError, RecursionError):
        return about


def _words(about: str) -> str:
    """Return a store's description in one line."""
    meaning = _meaning(about)
    if not isinstance(meaning, dict):
        return about
    fields = cast("dict[str, object]", meaning)
    stated = {
        name: it for name, it in fields.items() if it is not None and it is not False and it != ""
    }
    return ", ".join(f"{name} {str(value)[:_LEGIBLE]}" for name, value in stated.items())


def _name(key: bytes) -> str:
    return key.hex()[:_LEGIBLE]


def _age(ages: Sequence[int], which: Callable[[Sequence[int]], int]) -> str:
    if not ages:
        return "-"
    age = which(ages)
    unit, span = next(((unit, span) for unit, span in _SPANS if age >= span), _SPANS[-1])
    return f"{age // span} {unit}"


def _size(count: int) -> str:
    size, at = float(count), 0
    while size >= _STEP and at + 1 < len(_SIZES):
        size, at = size / _STEP, at + 1
    return f"{size:.1f} {_SIZES[at]}" if at else f"{count} B"


_BESIDE = "Where another process writes, nothing is {}; an engine that starts meanwhile reads only."
_ACTIONS = {
    "ls": ("list the stores in a folder", _ls, None),
    "verify": (
        "read and prove every block, and remove what is damaged; exit status 1 if anything is",
        _verify,
        _BESIDE.format("removed"),
    ),
    "gc": (
        "give back the space of free slots; with --older-than that of old stores",
        _gc,
        _BESIDE.format("done"),
    ),
}

COMMAND = ("look at, verify and clean the files of disk tiers and kept host tiers", _arguments)
"""Help text of the command, and its function for arguments."""
