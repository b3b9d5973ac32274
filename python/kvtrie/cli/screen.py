"""The screen of `kvtrie top`: a view as a table, a row per tier.

Invariant: an unknown value is shown as a dash, never as a number. Cost: a table per refresh.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvtrie.output import write_output
from kvtrie.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.cli.view import MachineView, TierView, View

__all__ = ["draw", "save_picture"]

_WIDTH = 140
_BAR = 8
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIMES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_NO_TENTHS = 99.95
_LATE = 6
_WIDE = {
    "policy",
    "slots",
    "clean",
    "ever",
    "read/s",
    "written/s",
}  # columns left out on a narrow terminal


def draw(view: View, title: str, width: int) -> Group:
    """Return the whole screen, for a terminal of `width` columns."""
    several = len(view.machines) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    rows = [_row(tier, several=several) for tier in view.tiers]
    heads = [head for head in (rows[0] if rows else ()) if width >= _WIDTH or head not in _WIDE]
    for head in heads:
        left = head in {"tier", "policy", "used"}
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    lines = [line for machine in view.machines for line in _lines(machine)]
    lines += [_groups(tier, several=several) for tier in view.tiers if tier.groups]
    return Group(Text(printable(title), style="bold"), *lines, Text(), table)


def save_picture(path: Path, view: View, title: str) -> None:
    """Write the screen as SVG, without external fonts."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(draw(view, title, _WIDTH))
    picture = console.export_svg(title="kvtrie top", unique_id="kvtrie-top")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    write_output(path, picture)


def _lines(machine: MachineView) -> list[Text]:
    name = printable(machine.machine)
    if not machine.up:
        return [Text(f"machine {name}: closed or broken", style="red")]
    return [
        Text(
            f"machine {name} at {_time(machine.time)}: "
            f"{_number(machine.requests)} requests/s, {machine.hits:.1%} of blocks found, "
            f"{machine.hits_ever:.1%} ever"
        ),
        Text(
            f"{machine.blocks:,} blocks, {machine.leases} leases, {machine.moves} moves in flight",
            style="dim",
        ),
    ]


def _groups(tier: TierView, *, several: bool) -> Text:
    """Return the slots of each group of layers on a tier as text."""
    counts = ", ".join(
        f"group {number}: {held:,} held, {released:,} released"
        for number, (held, released) in enumerate(tier.groups)
    )
    return Text(f"{_name(tier, several=several)}: {counts}", style="dim")


def _name(tier: TierView, *, several: bool) -> str:
    return printable(f"{tier.machine}:{tier.tier}" if several else tier.tier)


def _row(tier: TierView, *, several: bool) -> dict[str, str | Text]:
    full = round(_BAR * tier.used)
    return {
        "tier": Text(_name(tier, several=several)),  # a label of any text, and no markup
        "policy": Text(printable(tier.policy)),
        "slots": f"{tier.slots:,}",
        "used": f"[cyan]{'█' * full}[/][dim]{'░' * (_BAR - full)}[/] {tier.used:.0%}",
        "clean": f"{tier.clean:.0%}",
        "hits": f"{tier.hits:.1%}",
        "ever": f"{tier.hits_ever:.1%}",
        "evict/s": _number(tier.evictions),
        "evict age": _time(tier.age),
        "load p50 p99": _pair(tier.loads),
        "store p50 p99": _pair(tier.stores),
        "read/s": _number(tier.read) + "B",
        "written/s": _number(tier.written) + "B",
    }


def _number(value: float) -> str:
    for unit, name in _UNITS:
        if value >= unit:
            return _short(value / unit) + name
    return _short(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, name in _TIMES:
        if seconds >= unit:
            return _short(seconds / unit) + name
    return "0"


def _short(value: float) -> str:
    """Return a value with one decimal below 100, and with none from 100 on."""
    return f"{value:.0f}" if value >= _NO_TENTHS else f"{value:.1f}"


def _pair(times: tuple[float, float] | None) -> str:
    return "-" if times is None else f"{_time(times[0])} {_time(times[1]):>{_LATE}}"
