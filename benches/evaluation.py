"""Evaluation: cells that are measured into a file of records; the same command resumes.

A record is one line of JSON, appended as soon as it is measured, so an interrupt loses at most the
record in progress. Stages are asked for one after another: a later one may choose its cells by the
records of earlier ones.
Invariant: a key that has a record is not measured again; a line that an interrupt cut off is. Cost:
one read of the file per run, and what the cells cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from benches.core.place import place
from benches.record import write
from kvtrie.canvas import INK, figure, save
from kvtrie.cli.progress import watched
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

RESULTS = Path(__file__).parent / "results"
INTERRUPTED = 130
WIDTH = 200
POINT, GOAL = "#1b4f8a", "#c0392b"

Record = TypeVar("Record", bound=Any)
"""A dataclass with a property `key`, and a field `world` if files have records of several."""

Key: TypeAlias = tuple[Any, ...]


class Interval(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Cell(NamedTuple):
    """Figures that are measured together.

    Attributes:
        keys: of the records.
        measure: given the keys that have no record, measures and yields the records.
    """

    keys: Sequence[Key]
    measure: Callable[[list[Key]], Iterable[Any]]


class Evaluation(ABC, Generic[Record]):
    """One evaluation: its cases, records and table.

    Args:
        given: the command's arguments.

    Attributes:
        name: of the command; records go to `target/NAME.jsonl`.
        record_name: the file in `benches/results` that `--record` writes.
        record: the class of a record.
        known: the records that there are, by their keys.
        world: the model and sizes; records of another world are left alone.
    """

    name: ClassVar[str]
    record_name: ClassVar[str]
    record: ClassVar[type]
    world: str = ""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.by_key: dict[Key, Record] = {}

    @staticmethod
    @abstractmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this evaluation alone."""

    @abstractmethod
    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """Yield what the bar says, and the cells."""

    @abstractmethod
    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return all figures, as `--json` prints them."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print the table."""

    @abstractmethod
    def draw(self, path: Path) -> None:
        """Write the picture."""

    def close(self) -> None:
        """Give back what was opened."""

    def load(self) -> None:
        """Read the records of this world from the file, if there is one.

        Raises:
            ConfigError: a whole line that is no record of this version.
        """
        path: Path = self.given.results
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # cut off while it was written
            try:
                record = self.record(**fields)
            except TypeError as error:
                raise ConfigError(
                    f"{path}, line {number}, is not a record of {self.name} ({error}): give "
                    "another file with --results"
                ) from error
            if getattr(record, "world", self.world) == self.world:
                self.by_key[record.key] = record

    def append(self, record: Record) -> None:
        """Keep a record, on a line after anything that an interrupt has left."""
        path: Path = self.given.results
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(max(0, file.seek(0, 2) - 1))
            broken = file.read(1) not in {b"", b"\n"}
            file.write(b"\n" * broken + json.dumps(asdict(record)).encode() + b"\n")
        self.by_key[record.key] = record

    def run(self) -> None:
        """Measure every cell that lacks a record."""
        for what, cells in self.stages():
            missing = [
                (cell, left)
                for cell in cells
                if (left := [key for key in dict.fromkeys(cell.keys) if key not in self.by_key])
            ]
            # A single cell draws its own bar, if it takes long.
            quiet = self.given.json or len(missing) == 1
            for cell, left in watched(missing, what, quiet=quiet):
                for record in cell.measure(left):
                    self.append(record)


def evaluate(
    evaluation: type[Evaluation[Any]], about: str, arguments: Sequence[str] | None = None
) -> int:
    """Measure what is missing, then print all of it.

    Args:
        evaluation: which.
        about: one sentence about it.
        arguments: of the command line.
    """
    given = _parse(evaluation, about, arguments)
    torch.set_num_threads(given.threads)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with closing(evaluation(given)) as made:
            made.load()
            try:
                if not given.report:
                    made.run()
            except KeyboardInterrupt:
                errors.print(
                    f"interrupted: {len(made.by_key)} records are in {given.results}; the same "
                    "command resumes, and --report shows what there is"
                )
                return INTERRUPTED
            return _report(made)
    except ConfigError as error:
        errors.print(str(error), markup=False)
        return 2


def _report(made: Evaluation[Any]) -> int:
    given = made.given
    if not made.by_key:
        raise ConfigError(f"{given.results} has no record of {made.world or made.name}")
    made.draw(given.picture)
    document = made.document(place() | {"torch": torch.__version__})
    if given.record:
        write(RESULTS / made.record_name, document)
    if given.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH, markup=False)
    made.show(console)
    if given.picture.exists():
        console.print(f"Picture: {given.picture}")
    return 0


def _parse(
    evaluation: type[Evaluation[Any]], about: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    results = Path("target") / f"{evaluation.name}.jsonl"
    parser = argparse.ArgumentParser(prog=f"make {evaluation.name} ARGS=", description=about)
    parser.add_argument("--results", type=Path, default=results, help="default: %(default)s")
    parser.add_argument("--picture", type=Path, help="default: next to the results")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="a random model and few cases")
    parser.add_argument("--record", action="store_true", help="write benches/results too")
    parser.add_argument("--json", action="store_true", help="print one document, no table")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    evaluation.options(parser)
    given = parser.parse_args(arguments)
    given.picture = given.picture or given.results.with_suffix(".png")
    for name, least in parser.get_default("least").items():
        if (value := getattr(given, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}: at least {least} wanted")
    return given


def table_of(title: str, columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> Table:
    """A table of rows; a column is a function of a row."""
    table = Table(title=title, box=None, pad_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left")
    for row in rows:
        table.add_row(*(column(row) for column in columns.values()))
    return table


def draw_intervals(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Interval]],
    *,
    label: str,
    goals: Mapping[tuple[str, str], float] | None = None,
    least: float | None = None,
) -> None:
    """Write a picture of intervals.

    Args:
        path: the file.
        title: of the picture.
        panels: by the panel's title and the row's name.
        label: of the axis of figures, with its unit.
        goals: by panel and row.
        least: the left end of the axis; what is below is drawn there.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    drawn = figure(title, 1.6 + 0.35 * len(rows))
    axes = drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (panel, figures) in zip(axes, panels.items(), strict=True):
        for name, found in figures.items():
            at = rows.index(name)
            value, low, high = (each if least is None else max(least, each) for each in found)
            axis.plot([low, high], [at, at], color=POINT, linewidth=1.5)
            axis.plot([value], [at], "o", color=POINT)
            if (goal := (goals or {}).get((panel, name))) is not None:
                axis.plot([goal, goal], [at - 0.3, at + 0.3], color=GOAL, linewidth=2)
        axis.axvline(0, color=INK, linewidth=0.8)
        axis.set_title(panel, color=INK, fontsize=11)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    drawn.supxlabel(label, color=INK, fontsize=10)
    save(drawn, path)
