"""Evaluation: cells that are measured into records; the same command resumes.

A record is kept as soon as it is measured, so an interrupt loses at most the record in progress;
an evaluation's is one line of JSON. Stages are asked for one after another: a later one may choose
its cells by the records of earlier ones.
Invariant: a key that has a record is not measured again; a line that an interrupt cut off is. Cost:
one read of the file per run, and what the cells cost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table

from benches.core.place import place
from benches.record import write
from kvtrie.cli.progress import watched
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results"
INTERRUPTED = 130
WIDTH = 200

Record = TypeVar("Record", bound=Any)
"""A dataclass with a property `key`, and a field `world` if files have records of several."""

Key: TypeAlias = tuple[Any, ...]


class Cell(NamedTuple):
    """Figures that are measured together.

    Attributes:
        keys: of the records.
        measure: given the keys that have no record, measures and yields the records.
    """

    keys: Sequence[Key]
    measure: Callable[[list[Key]], Iterable[Any]]


class Runner(ABC, Generic[Record]):
    """Measures the cells that have no record.

    Attributes:
        by_key: the records that there are, by their keys.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, Record] = {}

    def append(self, record: Record) -> None:
        """Keep a record."""
        self.by_key[record.key] = record

    def complete(
        self, what: str, cells: Iterable[Cell], *, quiet: bool = False, workers: int = 0
    ) -> None:
        """Measure the keys of cells that have no record.

        Args:
            what: the text before the bar.
            cells: in this order, unless there are workers.
            quiet: draw no bar.
            workers: processes; 0 measures in this one.
        """
        missing = [
            (cell, left)
            for cell in cells
            if (left := [key for key in dict.fromkeys(cell.keys) if key not in self.by_key])
        ]
        if workers:
            with ProcessPoolExecutor(workers) as pool:
                running = [pool.submit(_measured, *each) for each in missing]
                for ended in watched(as_completed(running), what, quiet=quiet, total=len(running)):
                    for record in ended.result():
                        self.append(record)
            return
        # A single cell draws its own bar, if it takes long.
        for cell, left in watched(missing, what, quiet=quiet or len(missing) == 1):
            for record in cell.measure(left):
                self.append(record)


def _measured(cell: Cell, left: list[Key]) -> list[Any]:
    return list(cell.measure(left))


class Evaluation(Runner[Record]):
    """One evaluation: its cases, records and table.

    Args:
        given: the command's arguments.

    Attributes:
        name: of the command; records go to `target/NAME.jsonl`.
        record_name: the file in `benches/results` that `--record` writes.
        record: the class of a record.
        world: the model and sizes; records of another world are left alone.
    """

    name: ClassVar[str]
    record_name: ClassVar[str]
    record: ClassVar[type]
    world: str = ""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.given = given

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
        super().append(record)

    def run(self) -> None:
        """Measure every cell that lacks a record."""
        for what, cells in self.stages():
            self.complete(what, cells, quiet=self.given.json)


def evaluate(evaluation: type[Evaluation[Any]], arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then print all of it.

    Args:
        evaluation: which.
        arguments: of the command line.
    """
    import torch  # which policies do without

    given = _parse(evaluation, arguments)
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
            return _report(made, torch.__version__)
    except ConfigError as error:
        errors.print(str(error), markup=False)
        return 2


def _report(made: Evaluation[Any], torch: str) -> int:
    given = made.given
    if not made.by_key:
        raise ConfigError(f"{given.results} has no record of {made.world or made.name}")
    document = made.document(place() | {"torch": torch})
    if given.record:
        write(RESULTS / made.record_name, document)
    if given.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH, markup=False)
    made.show(console)
    return 0


def _parse(
    evaluation: type[Evaluation[Any]], arguments: Sequence[str] | None
) -> argparse.Namespace:
    results = Path("target") / f"{evaluation.name}.jsonl"
    about = (sys.modules[evaluation.__module__].__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"make {evaluation.name} ARGS=", description=about)
    parser.add_argument("--results", type=Path, default=results, help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="a random model and few cases")
    parser.add_argument("--record", action="store_true", help="write benches/results too")
    parser.add_argument("--json", action="store_true", help="print one document, no table")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    evaluation.options(parser)
    given = parser.parse_args(arguments)
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


def started(module: str, *words: str, python: Path | str = sys.executable) -> Popen[str]:
    """Start a module that imports the benches; its input and output are pipes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Popen(
        [str(python), "-m", module, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=PIPE,
        stdout=PIPE,
        text=True,
    )


def lines_of(program: Popen[str]) -> Iterator[dict[str, Any]]:
    """The lines of JSON that a program prints.

    Raises:
        ConfigError: it has ended, and failed.
    """
    for line in program.stdout or ():
        if line.startswith("{"):
            yield json.loads(line)
    if program.wait():
        raise ConfigError(f"the program ended with {program.returncode}; its output is above")
