"""The command line: `kvtrie demo`, `generate`, `replay`, `sim`, `top`, `disk` and more.

```text
demo, fuse, profile, calibrate, replay, remote --> output_file      a model's work, timings, traces
generate, finetune, longcontext --> model, cache, dotted            settings with dotted keys
disk --> folder --> kept_file --> found                             files of a tier on disk
top --> view --> scrape      advise --> advice_text      doctor --> control
trace --> replay, disk, advise --> progress
```

Arguments are parsed here. The work is done in modules imported when a command runs.
Exit status: 0 on success, 1 if a verdict failed, 2 for a wrong argument or setting or an unreadable
file, 130 after Ctrl-C. Cost: `import kvtrie`, until a command runs.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from kvtrie.cli import (
    advise,
    calibrate,
    control,
    demo,
    disk,
    doctor,
    finetune,
    fuse,
    generate,
    launch,
    longcontext,
    profile,
    remote,
    replay,
    show,
    sim,
    top,
    trace,
)
from kvtrie.errors import KvtrieError
from kvtrie.printable import MESSAGE, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {
    "advise": advise.COMMAND,
    "calibrate": calibrate.COMMAND,
    "demo": demo.COMMAND,
    "fuse": fuse.COMMAND,
    "generate": generate.COMMAND,
    **finetune.COMMANDS,
    "longcontext_eval": longcontext.COMMAND,
    "replay": replay.COMMAND,
    "sim": sim.COMMAND,
    "trace": trace.COMMAND,
    "map": show.MAP,
    "stats": show.STATS,
    "top": top.COMMAND,
    "disk": disk.COMMAND,
    "doctor": doctor.COMMAND,
    "remote": remote.COMMAND,
    "profile": profile.COMMAND,
    "ctl": control.CTL,
    "why": control.WHY,
    **launch.COMMANDS,
}
# Commands with dotted keys, or with an engine's arguments, parse their arguments themselves.
_DOTTED = {
    "generate": generate.run,
    **{name: partial(finetune.run, name) for name in finetune.COMMANDS},
    "longcontext_eval": longcontext.run,
    **{name: partial(launch.run, name) for name in launch.COMMANDS},
}
_REFUSED = 2
_INTERRUPTED = 130
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of a full or broken standard output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: the arguments after `kvtrie`. None takes the process's arguments.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    dotted = _DOTTED.get(words[0]) if words else None
    try:
        if dotted is None:
            options = _parser().parse_args(words)
            status: int = options.run(options)
        else:
            status = dotted(words[1:])
        sys.stdout.flush()
    except KvtrieError as error:
        sys.stderr.write(f"kvtrie {words[0]}: {printable(error, MESSAGE)}\n")
        return _REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, for example `head`, has closed the pipe. The interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as error:
        sys.stderr.write(f"kvtrie {words[0]}: {_lacking(error)}\n")
        return _REFUSED
    return status


def _lacking(error: OSError | MemoryError) -> str:
    """Describe a failure of the system itself: no room for the output, memory, threads."""
    if isinstance(error, MemoryError):
        return f"not enough memory: {str(error) or 'an allocation failed'}"
    if error.errno not in _UNWRITTEN or error.filename is not None:
        return f"the system refuses: {error}"
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"cannot write the output: {error.strerror}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtrie",
        description="Decides what KV is cached where, what to keep, move and compute again.",
    )
    parser.add_argument(
        "--version", action="version", version=f"kvtrie {doctor.version_and_commit()}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, arguments) in _COMMANDS.items():
        arguments(commands.add_parser(name, help=summary, description=summary))
    return parser
