"""Instructions that the core's calls take, compared with a record.

Counts do not wobble as times do: the same binary gives the same numbers on a busy machine. They
belong to one compiler and one target, so the record is keyed by both. More than 5 % above what is
on record fails; `--record` writes a new one. Needs valgrind; without it that is said, and no more.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECORD = Path(__file__).with_name("instructions.json")
LIMIT = 1.05
# One inclusive line of callgrind_annotate: "1,234,567 (12.3%)  file:instructions::counted_x [..]".
LINE = re.compile(r"^\s*([\d,]+)\s+\([^)]*\)\s+\S*instructions::counted_(\w+)", re.MULTILINE)
# Calls in one counted function, if that is not one call per request.
LABELS = {
    "lookup": "longest prefix of a prompt, per call",
    "acquire": "acquire of a prompt, per request",
    "commit": "commit of prompt and answer, per call",
    "release": "release, per request",
    "decode": "one token of 64 requests, per batch",
    "evict_and_insert": "4 blocks in, 4 blocks out, per request",
    "flood": "a prompt for which 4000 sequences leave",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the counts as the new record")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    if shutil.which("valgrind") is None:
        console.print("instructions: not run, there is no valgrind")
        return 0
    key, counts = compiler(), count(build())
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    recorded = record.get(key, {})
    if arguments.record:
        RECORD.write_text(json.dumps({**record, key: counts}, indent=2, sort_keys=True) + "\n")
    table = Table(title=f"instructions, {key}")
    for name in ("what", "now", "on record", "ratio"):
        table.add_column(name, justify="left" if name == "what" else "right")
    worse = []
    for name, now in counts.items():
        before = recorded.get(name)
        ratio = now / before if before else None
        if ratio is not None and ratio > LIMIT:
            worse.append(name)
        table.add_row(
            LABELS[name],
            f"{now:,}",
            f"{before:,}" if before else "-",
            f"{ratio:.3f}" if ratio else "-",
        )
    console.print(table)
    if arguments.json:
        sys.stdout.write(json.dumps({"key": key, "counts": counts, "record": recorded}) + "\n")
    if not recorded:
        console.print("instructions: nothing is on record for this compiler and target")
    if worse and not arguments.record:
        console.print(f"instructions: more than 5 % above the record: {', '.join(worse)}")
        return 1
    return 0


def compiler() -> str:
    """Version of rustc and the target it builds for."""
    lines = run("rustc", "-vV").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    return f"rustc {fields['release']} {fields['host']}"


def build() -> Path:
    """The benchmark's binary, built if needed."""
    printed = run(
        *("cargo", "bench", "-p", "kvtrie-core", "--bench", "instructions", "--no-run"),
        "--message-format=json",
    )
    messages = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    made = [message["executable"] for message in messages if message.get("executable")]
    return Path(made[-1])


def count(binary: Path) -> dict[str, int]:
    """Instructions per call of every counted function."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "callgrind.out")
        run(
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"),
            *("--toggle-collect=instructions::counted_*", str(binary)),
        )
        printed = run("callgrind_annotate", "--inclusive=yes", "--threshold=100", str(out))
        calls = called(out.read_text())
    return {
        name: round(int(total.replace(",", "")) / calls[name])
        for total, name in sorted(
            LINE.findall(printed), key=lambda pair: list(LABELS).index(pair[1])
        )
    }


def called(profile: str) -> dict[str, int]:
    """How often each counted function was called, from callgrind's own file."""
    names = dict(re.findall(r"\((\d+)\) instructions::counted_(\w+)", profile))
    calls: dict[str, int] = {}
    for number, times in re.findall(r"cfn=\((\d+)\)[^\n]*\ncalls=(\d+)", profile):
        if number in names:
            calls[names[number]] = calls.get(names[number], 0) + int(times)
    return calls


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
