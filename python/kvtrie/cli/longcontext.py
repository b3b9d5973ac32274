"""`kvtrie longcontext_eval`: loss and exact matches of a model under a cache's policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.cache import add_cache
from kvtrie.cli.dotted import add_data, chosen_data, make_parser, read
from kvtrie.cli.model import DEVICE, MODEL, device, resolve
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvtrie.train import DataModule
    from kvtrie.train.saved import About

__all__ = ["COMMAND", "run"]

_NAME = "longcontext_eval"
_SUMMARY = "loss and exact matches of a model on long data, under a cache's policy"
_SPLITS = ("train", "validation", "test", "all")


def run(words: Sequence[str]) -> int:
    """Run `kvtrie longcontext_eval` with its arguments."""
    given = _parsed(words)
    from kvtrie.selective.settings import CacheSettings
    from kvtrie.settings.argument import word
    from kvtrie.train import LongContextGradients, evaluate, make_head
    from kvtrie.train.saved import Saved

    split = None if given.split is None else word("split", given.split, _SPLITS)
    where = device(given.device)
    settings = CacheSettings(**dict(given.kv_cache))
    data = chosen_data(given.data)
    saved = Saved(Path(given.model))
    about = saved.about()
    speaker = resolve(given.model)
    model: Any = speaker.model
    if given.precision is not None:
        from kvtrie.demo.long_prompt import as_precise

        model = as_precise(model, given.precision)
    model.to(where)
    name = given.head_model or ("next_token_prediction" if about is None else about.head_model)
    classes = name != "next_token_prediction"
    data.prepare(
        speaker.tokens,
        continued=speaker.continued,
        chat=speaker.chat,
        classes=classes,
        name=given.model,
    )
    head = make_head(name, model, data.label_tokens() if classes else None)
    if about is not None and list(head.parameters()):
        saved.load_head(saved.steps()[-1], head)
    split, places = _chosen(data, split)
    tool = LongContextGradients(model, head, settings, yarn_rope=given.yarn_rope)
    found = evaluate(tool, data, places, size=given.micro_batch_size, most=given.max_iters)
    if given.json:
        shown = {name: getattr(found, name) for name in type(found).__slots__}
        sys.stdout.write(json.dumps({"cache": settings.name, "split": split, **shown}) + "\n")
        return 0
    exact = "" if found.exact is None else f", {100 * found.exact:.1f} % exact"
    sys.stdout.write(
        f"{speaker.name} under {settings.name} of {settings.cache_length} rows: loss "
        f"{found.loss:.4f}{exact}, {found.cases} cases of {split}, {found.tokens} tokens\n"
    )
    return 0


def _chosen(data: DataModule, split: str | None) -> tuple[str, list[int]]:
    """Return the name of the split, and the places of its cases.

    Raises:
        ConfigError: the split has no cases.
    """
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    if split is None:
        split = "test" if data.test.places else "validation"
    chosen = [parts[split]] if split in parts else parts.values()
    places = [at for part in chosen for at in part.places]
    if not places:
        has = ", ".join(f"{name} {len(part.places)}" for name, part in parts.items())
        raise ConfigError(
            f"{type(data).__name__} has no cases in the split {split} ({has}): name another "
            "--split; --data.test_set_tag rest makes a test set of cases above max_seq_length"
        )
    return split, places


def _parsed(words: Sequence[str]) -> Any:  # noqa: ANN401 - a jsonargparse namespace
    """Return the settings in the arguments. Defaults are the settings of the run in MODEL."""
    for each in words:
        if (Path(each) / "run.json").is_file():
            from kvtrie.train.saved import Saved

            about = Saved(Path(each)).about()
            found = read(_parser(about), words)
            if found.model == each:
                return found
    return read(_parser(None), words)


def _parser(about: About | None) -> Any:  # noqa: ANN401 - a jsonargparse parser
    parser = make_parser(_NAME, _SUMMARY)
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL)
    add = parser.add_argument
    add("--head_model", type=str | None, help="from outputs to the loss, by default the run's own")
    add("--precision", type=str | None, help="of weights and KV: 32-true, 16-true or bf16-true")
    add("--device", type=str | None, help=DEVICE)
    add(
        "--split",
        type=str | None,
        help="train, validation, test or all, by default test, or validation without a test set",
    )
    add("--micro_batch_size", type=int, default=4, help="sequences of a pass")
    add("--max_iters", type=int | None, help="most passes")
    add("--yarn_rope", type=bool, default=True, help="scale RoPE beyond the trained length")
    add("--json", action="store_true", help="print a line of JSON")
    add_cache(parser)
    try:
        add_data(parser, None if about is None else about.data)
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; kvtrie {_NAME} needs: pip install 'kvtrie[train]'"
        ) from error
    if about is not None and about.kv_cache is not None:
        own = {f"kv_cache.{name}": each for name, each in about.kv_cache.items()}
        parser.set_defaults({**own, "yarn_rope": about.yarn_rope})
    return parser


def _arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `run` parses the dotted keys of this command."""
    del parser


COMMAND = (_SUMMARY, _arguments)
"""Summary of the command, and its function for arguments."""
