"""`kvtrie vllm` and `kvtrie sglang`: start a server with kvtrie by a single command.

The command builds the engine's own flags and replaces its process with the engine, so signals, the
exit status and a service manager reach the engine.
Invariant: no flag of the caller is overridden. A flag set by kvtrie, and a repeated option, is
refused before the engine starts. Cost: `import kvtrie`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie import BlockManager
from kvtrie.cli.launch.options import add_options
from kvtrie.cli.launch.sglang import sglang_command
from kvtrie.cli.launch.vllm import vllm_command
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "run"]

_ENGINES: dict[str, Callable[[argparse.Namespace, list[str]], list[str]]] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
}
COMMANDS = {
    name: (f"start {title} with kvtrie", partial(add_options, name))
    for name, title in (("vllm", "a vLLM server"), ("sglang", "an SGLang server"))
}


def run(engine: str, words: Sequence[str]) -> int:
    """Replace this process with a server of an engine, or print its command.

    Args:
        engine: "vllm" or "sglang".
        words: the arguments after `kvtrie vllm` or `kvtrie sglang`.

    Raises:
        ConfigError: a wrong size, path or policy, a flag of the engine set by kvtrie, or an engine
            that is not installed.
    """
    end = words.index("--") if "--" in words else len(words)
    own, args = list(words[:end]), list(words[end + 1 :])
    parser = argparse.ArgumentParser(prog=f"kvtrie {engine}", allow_abbrev=False)
    add_options(engine, parser)
    given, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(
            f"unknown arguments: {shlex.join(unknown)}; arguments of `{engine} serve` follow ' -- '"
        )
    if given.policy is not None:
        word("--policy", given.policy, tuple(BlockManager.policies()))
    command = _ENGINES[engine](given, args)
    if given.print:
        sys.stdout.write(shlex.join(command) + "\n")
        return 0
    return _replace(command)


def _replace(command: list[str]) -> int:
    """Become the engine installed next to kvtrie, or else the engine on PATH.

    Raises:
        ConfigError: the engine is not installed, or failed to start.
    """
    name = command[0]
    next_to_python = Path(sys.executable).with_name(name)
    path = str(next_to_python) if os.access(next_to_python, os.X_OK) else shutil.which(name)
    if path is None:
        raise ConfigError(
            f"there is no {name} next to {sys.executable} or on PATH: pip install {name} in the "
            "environment that has kvtrie"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, [path, *command[1:]])  # noqa: S606 - replaces this process, without a shell
    except OSError as error:
        raise ConfigError(f"cannot start {path}: {error.strerror}") from error
