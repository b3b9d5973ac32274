"""`kvtrie generate`: an answer to a prompt of any length, in a fixed number of rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvtrie.cli.cache import add_cache
from kvtrie.cli.model import DEVICE, MODEL, device, resolve
from kvtrie.errors import ConfigError
from kvtrie.input import read_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["COMMAND", "run"]

_SUMMARY = "an answer to a prompt of any length, in a cache of fixed size"
_MOST_SAMPLES = 65_536
_MISSING = "jsonargparse is not installed; kvtrie generate needs: pip install 'kvtrie[hf,cli]'"


def run(words: Sequence[str]) -> int:
    """Run `kvtrie generate` with its arguments."""
    given = _parsed(words)
    prompt = given.prompt
    if (prompt is None) == (given.prompt_file is None):
        raise ConfigError("give a --prompt or a --prompt_file")
    if given.prompt_file is not None:
        prompt = read_text(given.prompt_file, "the prompt")
    from kvtrie.selective.settings import CacheSettings

    settings = CacheSettings(**dict(given.kv_cache))
    where, sampling = device(given.device), _sampling(given)
    speaker = resolve(given.model)
    from kvtrie.demo.long_prompt import answer

    answer(
        speaker,
        prompt,
        settings,
        write=sys.stdout.write,
        precision=given.precision,
        device=where,
        max_new_tokens=given.max_new_tokens,
        yarn_rope=given.yarn_rope,
        temp_size_gb=given.attention_forward_temp_size_gb,
        seed=given.seed,
        sampling=sampling,
    )
    return 0


def _sampling(given: Any) -> dict[str, Any]:  # noqa: ANN401 - a namespace
    """Return the sampling arguments of `generate`.

    Raises:
        ConfigError: an invalid number, or a number without an effect.
    """
    from kvtrie.settings.argument import real, whole

    samples = whole("num_samples", given.num_samples, 1, _MOST_SAMPLES)
    sampling = [name for name in ("top_k", "top_p", "seed") if given[name] is not None]
    sampling += ["num_samples"] if samples > 1 else []
    warm = None if given.temperature is None else real("temperature", given.temperature, 0, 1e6)
    if warm == 0 or (warm is None and not sampling):
        if sampling:
            raise ConfigError(
                f"temperature 0 takes the likeliest tokens, so {', '.join(sampling)} would have no "
                "effect"
            )
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": 1.0 if warm is None else warm,
        "top_k": 0 if given.top_k is None else whole("top_k", given.top_k, 1, 2**31 - 1),
        "top_p": 1.0 if given.top_p is None else real("top_p", given.top_p, 1e-9, 1),
        "num_return_sequences": samples,
    }


def _parsed(words: Sequence[str]) -> Any:  # noqa: ANN401 - a jsonargparse namespace
    try:
        import jsonargparse
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    try:
        return _parser().parse_args(list(words))
    except jsonargparse.ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _parser() -> Any:  # noqa: ANN401 - a jsonargparse parser
    import jsonargparse

    parser: Any = jsonargparse.ArgumentParser(
        prog="kvtrie generate", description=_SUMMARY.capitalize() + ".", exit_on_error=False
    )
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL)
    parser.add_argument("--config", action="config", help="a YAML file with these keys")
    add = parser.add_argument
    add("--prompt", type=str | None, help="the prompt")
    add("--prompt_file", type=str | None, metavar="FILE", help="a text file to read instead")
    add("--max_new_tokens", type=int, default=50, help="most tokens of the answer")
    add("--precision", type=str | None, help="of weights and KV: 32-true, 16-true or bf16-true")
    add("--device", type=str | None, help=DEVICE)
    add(
        "--temperature",
        type=float | None,
        help="draw tokens at this temperature. 0, or none, takes the likeliest",
    )
    add("--top_k", type=int | None, help="draw among this number of the likeliest tokens")
    add("--top_p", type=float | None, help="draw among the likeliest tokens of this share")
    add("--num_samples", type=int, default=1, help="answers, drawn independently")
    add("--seed", type=int | None, help="seed of the drawn tokens")
    add("--yarn_rope", type=bool, default=True, help="scale RoPE beyond the trained length")
    add(
        "--attention_forward_temp_size_gb",
        type=float,
        default=3.0,
        help="bound of attention's temporary arrays",
    )
    add_cache(parser)
    return parser


def _arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `run` parses the dotted keys of this command."""
    del parser


COMMAND = (_SUMMARY, _arguments)
"""Summary of the command, and its function for arguments."""
