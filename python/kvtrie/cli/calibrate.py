"""`kvtrie calibrate`: measures the effect of lower tiers' formats on a model's next tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.model import DEVICE, MODEL, device, resolve
from kvtrie.cli.output_file import output_file
from kvtrie.input import read_text
from kvtrie.output import check_output, write_output

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help="text for the model to read (default: a story)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)"
    )
    parser.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="prompts at most (default: 8)"
    )
    parser.add_argument(
        "--block-tokens", type=int, default=16, metavar="N", help="tokens per block (default: 16)"
    )
    parser.add_argument(
        "--native-last",
        type=int,
        default=0,
        metavar="N",
        help="tokens to compute instead of load at the end of a prefix (default: 0)",
    )
    parser.add_argument(
        "--native-first",
        type=int,
        default=0,
        metavar="N",
        help="tokens at the start of a prompt to keep in the model's format, as a server's "
        "native_first (default: 0)",
    )
    parser.add_argument(
        "--out",
        type=output_file,
        default=Path("calibration.json"),
        metavar="FILE",
        help="file to write it to (default: calibration.json)",
    )
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--json", action="store_true", help="print the same as a JSON document")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    check_output(given.out)
    text = None if given.texts is None else read_text(given.texts, "the text")
    where = device(given.device)
    speaker = resolve(given.model)
    from kvtrie.demo.passages import PASSAGES, SYSTEM
    from kvtrie.engines.transformers.calibration import calibrate, document, prompts_of

    model: Any = speaker.model  # its `to` is untyped
    model = model.to(where)
    tokens = speaker.tokens(SYSTEM + "".join(PASSAGES) if text is None else text)
    prompts = prompts_of(tokens, given.tokens, given.prompts)
    costs = calibrate(
        model,
        prompts,
        block_tokens=given.block_tokens,
        native_last=given.native_last,
        native_first=given.native_first,
        on_step=lambda name: given.json or sys.stderr.write(f"{name}\n"),
    )
    made = document(
        model,
        costs,
        prompts,
        block_tokens=given.block_tokens,
        native_last=given.native_last,
        native_first=given.native_first,
    )
    write_output(given.out, json.dumps(made, indent=2) + "\n")
    sys.stdout.write(json.dumps(made) + "\n" if given.json else _table(made, given.out))
    return 0


def _table(made: dict[str, Any], out: Path) -> str:
    heads = f"{'format':<8}{'KL mean':>11}{'KL p99':>11}{'top-1':>9}{'bytes':>11}{'of bf16':>9}"
    lines = [f"{heads}{'tokens':>9}"]
    lines += [
        f"{name:<8}{row['kl_mean']:>11.2e}{row['kl_p99']:>11.2e}{row['top1']:>9.2%}"
        f"{row['block_bytes']:>11,}{row['of_bf16']:>9.3f}{row['tokens']:>9}"
        for name, row in made["formats"].items()
    ]
    each = made["tokens"] // made["prompts"]
    about = f"{made['tokens']} tokens in {made['prompts']} prompts of {each}; written to {out}"
    return "\n".join([*lines, about]) + "\n"


COMMAND = (
    "measure how far number formats of lower tiers move a model's next tokens",
    _arguments,
)
