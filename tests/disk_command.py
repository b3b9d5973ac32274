"""`kvtrie disk` in this process: exit status, output, and the folder that it works on."""

import json
import time

from keeping import Clock, fill, prompt

from kvtrie.cli import main

DAY = 24 * 60 * 60 * 10**9
PROMPTS = [prompt(seed) for seed in range(12)]


def filled(folder):
    """A folder with a store of twelve blocks, last used five days ago."""
    fill(folder, PROMPTS, wall=Clock(time.time_ns() - 5 * DAY))
    return folder


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    try:
        status = main(["disk", *map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *arguments, status=0):
    """The JSON output of a command."""
    ended, out, err = run(capsys, *arguments, "--json")
    assert (ended, err) == (status, "")
    return json.loads(out)


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvtrie disk")
    assert err.count("\n") == 1
    return err


def on_disk(folder):
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
