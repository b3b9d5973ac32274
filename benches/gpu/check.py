"""Check everything that needs a CUDA device, in at most nine minutes, and write one report.

    make gpu-check
    PYTHONPATH=SITE python3 -m benches.gpu.check

The second form is for a machine with a card and no network: unpack the wheel into SITE. Each row is
a program of its own. A row that fails or runs out of its time costs no other row. Results go to
`target/gpu-check.jsonl` as they come, and the same command goes on after those that have passed on
this card with these sources; `--again` starts over. The report is `target/gpu-check.json` and
`.md`. The exit status is 0 if every row has passed, 1 if one has failed and 2 if one has not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[2]
LIMIT_S = 520.0  # of all rows; the rest of nine minutes is for starting and for the report
LEAST_S = 15.0  # a row is not begun with less left
TAIL = 2000  # characters of a row's output in the report
NO_DEVICE = "no CUDA device"
NO_TESTS = 5  # pytest's status

KERNELS = "tests/kernels/test_on_device.py"
SMALL = "skipped or (real_sizes and int8 and 576)"
SANITIZER = ("compute-sanitizer", "--error-exitcode", "1", "--tool")


@dataclass(frozen=True, slots=True)
class Row:
    """A check.

    Attributes:
        name: its name in the report.
        command: its program, without the interpreter if it begins with an option.
        seconds: its limit.
        needs: programs and packages without which it does not run.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()


def pytest(*words: str) -> tuple[str, ...]:
    """The command of some tests marked `gpu`."""
    return ("-m", "pytest", "-q", "-x", "-m", "gpu", *words)


ROWS = (
    Row("kernels and their twins", pytest(KERNELS), 120),
    Row(
        "attention, forward and backward",
        pytest("tests/kernels/test_flash_on_device.py"),
        90,
    ),
    Row("memory of tiers", pytest("tests/tiers"), 40),
    Row("streams", pytest("tests/transfer/test_streams_on_gpu.py"), 40),
    Row("late copies", pytest("tests/engines/test_late_copies.py"), 40),
    Row("an engine layer by layer", pytest("tests/engines/test_layer_by_layer.py"), 40),
    Row("selective generation", pytest("tests/selective/test_generate_on_card.py"), 40),
    Row("a training step", pytest("tests/train/test_step_on_card.py"), 40),
    Row("torchao buffers", pytest("tests/selective/test_foreign.py"), 30, ("torchao",)),
    Row("bitsandbytes buffers", pytest("tests/selective/test_foreign.py"), 30, ("bitsandbytes",)),
    Row("the demo", pytest("tests/demo"), 40),
    Row("the paged engine", ("-m", "examples.paged_engine", "--audit"), 60),
    Row("hidden share of copies", ("-m", "benches.gpu", "--only", "overlap", "--json"), 60),
    Row("bandwidth and link", ("-m", "benches.gpu", "--only", "bandwidth", "--only", "link"), 60),
    Row("padding of attention", ("-m", "benches.selective.padding", "--device", "cuda"), 60),
    Row(
        "sanitizer, memory",
        (*SANITIZER, "memcheck", "--report-api-errors", "no", "-m", "pytest", KERNELS, "-k", SMALL),
        60,
        ("compute-sanitizer",),
    ),
    Row(
        "sanitizer, races",
        (*SANITIZER, "racecheck", "-m", "pytest", KERNELS, "-k", SMALL),
        60,
        ("compute-sanitizer",),
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a row.

    Attributes:
        name: the row's.
        state: whether it has passed, or run.
        reason: why it has failed or not run.
        seconds: the time it took.
        output: the end of what it printed.
    """

    name: str
    state: Literal["passed", "failed", "not run"]
    reason: str = ""
    seconds: float = 0.0
    output: str = ""


def device() -> str | None:
    """The card's name, asked in another process, which gives its memory back."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ask], check=True, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None


def sources() -> str:
    """A digest of the sources, so that results of others do not count."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("python", "cuda", "rust", "benches", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".rs", ".cu", ".cuh", ".h"} and "envs" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def missing(row: Row) -> str:
    """A program or package that a row needs and that is not there; empty if there is none."""
    gone = (one for one in row.needs if shutil.which(one) is None and find_spec(one) is None)
    return next(gone, "")


def command(row: Row) -> list[str]:
    """A row's program with the interpreter in its place."""
    if row.command[0].startswith("-"):
        return [sys.executable, *row.command]
    at = row.command.index("-m")
    return [*row.command[:at], sys.executable, *row.command[at:]]


def carry_out(row: Row, seconds: float) -> Result:
    """Run a row within its time."""
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            command(row),
            check=False,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        printed = cast("bytes | str", late.stdout or b"")  # bytes, even of a text stream
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return Result(row.name, "failed", f"no end in {seconds:.0f} s", seconds, output[-TAIL:])
    except OSError as error:
        return Result(row.name, "failed", str(error))
    took, output = time.monotonic() - begun, ended.stdout[-TAIL:]
    if ended.returncode == NO_TESTS and "pytest" in row.command:
        return Result(row.name, "not run", "no test was selected", took, output)
    if ended.returncode:
        return Result(row.name, "failed", f"exit status {ended.returncode}", took, output)
    return Result(row.name, "passed", "", took, output)


def check(
    rows: Sequence[Row],
    card: str | None,
    passed: dict[str, Result],
    limit_s: float,
    run: Callable[[Row, float], Result] = carry_out,
) -> list[Result]:
    """The result of every row, of which those that have passed are not run again.

    Args:
        rows: the checks.
        card: the device's name; None if there is none, and nothing runs.
        passed: earlier results by name.
        limit_s: seconds for all rows.
        run: carries out a row within some seconds.
    """
    results: list[Result] = []
    left = limit_s
    for row in rows:
        if card is None:
            result = Result(row.name, "not run", NO_DEVICE)
        elif row.name in passed:
            result = passed[row.name]
        elif gone := missing(row):
            result = Result(row.name, "not run", f"{gone} is not installed")
        elif left < LEAST_S:
            result = Result(row.name, "not run", f"{limit_s:.0f} s are over: run it again")
        else:
            result = run(row, min(row.seconds, left))
            left -= result.seconds
        results.append(result)
    return results


def markdown(name: str, about: dict[str, str | None], results: Sequence[Result]) -> str:
    """The report for people."""
    lines = [
        f"# {name}: {about['card'] or NO_DEVICE}",
        "",
        f"{about['date']}, sources {about['sources']}",
        "",
        "| Row | Result | Seconds | Reason |",
        "|---|---|---|---|",
        *(f"| {one.name} | {one.state} | {one.seconds:.0f} | {one.reason} |" for one in results),
    ]
    for one in results:
        if one.state == "failed" and one.output:
            lines += ["", f"## {one.name}", "", "```", one.output, "```"]
    return "\n".join([*lines, ""])


def status(results: Sequence[Result]) -> int:
    """The exit status: 0 if all have passed, 1 if one has failed, 2 if one has not run."""
    states = {one.state for one in results}
    return 1 if "failed" in states else 2 if "not run" in states else 0


def main(
    words: Sequence[str] | None = None,
    *,
    rows: Sequence[Row] | None = None,
    name: str = "gpu-check",
) -> int:
    """Run the rows, write the report `name`, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="run rows again that have passed")
    parser.add_argument("--out", type=Path, default=ROOT / "target", help="folder of the report")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    log: Path = given.out / f"{name}.jsonl"
    card = device()
    about = {"date": time.strftime("%Y-%m-%d"), "card": card, "sources": sources()}
    mine = {name: about[name] for name in ("card", "sources")}
    passed: dict[str, Result] = {}
    if log.exists() and not given.again:
        for line in log.read_text().splitlines():
            record = json.loads(line)
            if record["about"] == mine and record["result"]["state"] == "passed":
                passed[record["result"]["name"]] = Result(**record["result"])

    def run(row: Row, seconds: float) -> Result:
        result = carry_out(row, seconds)
        with log.open("a") as file:
            file.write(json.dumps({"about": mine, "result": asdict(result)}) + "\n")
        return result

    results = check(rows or ROWS, card, passed, LIMIT_S, run)
    document = {"about": about, "rows": [asdict(one) for one in results]}
    (given.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    text = markdown(name, about, results)
    (given.out / f"{name}.md").write_text(text)
    sys.stdout.write(text)
    return status(results)


if __name__ == "__main__":
    sys.exit(main())
