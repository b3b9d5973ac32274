"""`kvtrie fuse`: a question over passages, by full prefill, plain reuse and fusion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "passages",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="a text file for each passage, or a single file to cut into passages",
    )
    parser.add_argument("--question", metavar="TEXT", help="the question about the files")
    parser.add_argument(
        "--demo", action="store_true", help="a built-in question over six built-in passages"
    )
    parser.add_argument("--tiny", action="store_true", help="a random model, and seconds")
    _choice_arguments(parser)
    parser.add_argument(
        "--tier",
        default="host",
        metavar="TIER",
        help="tier of the passages before they are fused: gpu, host, or disk:PATH:SIZE, where the "
        "next run finds their KV (default: %(default)s)",
    )
    parser.add_argument(
        "--split",
        type=int,
        metavar="N",
        help="cut files into passages of at most N tokens, at ends of sentences (default: 256 for "
        "a single file, while several files are a passage each)",
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw tokens x layers (--demo: kvtrie-fuse.png)",
    )
    parser.add_argument("--answer-tokens", type=int, metavar="N", help="tokens of an answer")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_run)


def _choice_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of the tokens to recompute, and its measurement."""
    parser.add_argument(
        "--select",
        metavar="WAY",
        help="none, all, random, first, keys, values, question, or several joined by + "
        "(default: first+question)",
    )
    parser.add_argument(
        "--ratio",
        type=float,
        metavar="X",
        help="share of the tokens to compute again (default: by --controller, or 0.15)",
    )
    parser.add_argument(
        "--controller",
        type=Path,
        metavar="PROFILE",
        help="choose the ratio by a file of `kvtrie profile`",
    )
    parser.add_argument(
        "--deviation",
        type=Path,
        metavar="FILE",
        help="choose the tokens, and without --ratio their share, by a profile of --measure",
    )
    parser.add_argument(
        "--measure",
        type=output_file,
        metavar="FILE",
        help="write by how much KV deviates when all tokens are computed again",
    )
    parser.add_argument(
        "--monitor", action="store_true", help="probe the fusion and compare it with a full prefill"
    )


def _run(given: argparse.Namespace) -> int:
    if given.demo == bool(given.passages) or bool(given.question) != bool(given.passages):
        raise ConfigError("give files with a --question, or --demo")
    if given.select is not None and given.deviation is not None:
        raise ConfigError("--deviation chooses the tokens: leave --select out")
    try:
        from kvtrie.demo.fusing import FuseOptions, fuse
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; fusion needs: pip install 'kvtrie[hf,cli]'"
        ) from error
    names = ("passages", "question", "tiny", "select", "ratio", "plot", "answer_tokens", "json")
    names += ("controller", "deviation", "measure", "monitor", "tier", "split")
    chosen = {name: getattr(given, name) for name in names}
    if given.demo and given.plot is None:
        chosen["plot"] = Path("kvtrie-fuse.png")
    # Settings without an argument keep their defaults.
    return fuse(FuseOptions(**{name: value for name, value in chosen.items() if value is not None}))


COMMAND = ("a question over passages whose KV is known: reused, or fused", _arguments)
"""Summary of the command, and its function for arguments."""
