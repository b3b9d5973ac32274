"""`kvtrie generate`: an answer to a prompt of any length, in a fixed number of rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.cache import add_cache
from kvtrie.cli.model import MODEL, resolve
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["COMMAND", "run"]

_SUMMARY = "an answer to a prompt of any length, in a cache of fixed size"
_MISSING = "jsonargparse is not installed; kvtrie generate needs: pip install 'kvtrie[hf,cli]'"


def run(words: Sequence[str]) -> int:
    """Read the words behind `kvtrie generate` and do what they say."""
    given = _parsed(words)
    prompt = given.prompt
    if (prompt is None) == (given.prompt_file is None):
        raise ConfigError("give a --prompt or a --prompt_file")
    if given.prompt_file is not None:
        try:
            prompt = Path(given.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {given.prompt_file}: {error}") from error
    from kvtrie.selective.settings import CacheSettings

    settings = CacheSettings(**dict(given.kv_cache))
    speaker = resolve(given.model)
    from kvtrie.demo.long_prompt import answer

    answer(
        speaker,
        prompt,
        settings,
        write=sys.stdout.write,
        precision=given.precision,
        device=given.device,
        max_new_tokens=given.max_new_tokens,
        yarn_rope=given.yarn_rope,
        temp_size_gb=given.attention_forward_temp_size_gb,
    )
    return 0


def _parsed(words: Sequence[str]) -> Any:  # noqa: ANN401 - a jsonargparse namespace
    try:
        import jsonargparse
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    parser: Any = jsonargparse.ArgumentParser(
        prog="kvtrie generate", description=_SUMMARY.capitalize() + ".", exit_on_error=False
    )
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL)
    parser.add_argument("--config", action="config", help="a YAML file with these keys")
    add = parser.add_argument
    add("--prompt", type=str | None, help="what to read")
    add("--prompt_file", type=str | None, metavar="FILE", help="a text file to read instead")
    add("--max_new_tokens", type=int, default=50, help="most tokens of the answer")
    add("--precision", type=str | None, help="of weights and KV: 32-true, 16-true or bf16-true")
    add("--device", type=str, default="cpu", help="where the model runs")
    add("--yarn_rope", type=bool, default=True, help="scale RoPE beyond the trained length")
    add(
        "--attention_forward_temp_size_gb",
        type=float,
        default=3.0,
        help="bound of attention's temporary arrays",
    )
    add_cache(parser)
    try:
        return parser.parse_args(list(words))
    except jsonargparse.ArgumentError as error:
        said = " ".join(str(error).split())
        raise ConfigError(said) from error


def _arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing: the words of this command have dotted keys and are read by `run`."""
    del parser


COMMAND = (_SUMMARY, _arguments)
"""What the command does, and the function that adds its arguments."""
