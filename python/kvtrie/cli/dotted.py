"""Commands with dotted keys: a parser, parsed arguments, and error texts.

Invariant: a wrong argument is a `ConfigError` of one line. `--help` explains a key with the
docstring of its class. Cost: jsonargparse is loaded when a command with dotted keys runs.
"""

# pyright: reportPrivateUsage=false
# (argparse has no public name for the arguments of a group)

from __future__ import annotations

import argparse
import inspect
import re
from pydoc import locate
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_data", "add_settings", "arguments", "chosen_data", "make_parser", "read"]

_ENTRY = re.compile(r"    (\**\w+): (.*)")


def make_parser(command: str, summary: str) -> Any:  # noqa: ANN401 - a jsonargparse parser
    """Make a parser that raises errors instead of leaving the process.

    Raises:
        ConfigError: jsonargparse is not installed.
    """
    try:
        import jsonargparse
    except ImportError as error:
        raise ConfigError(
            f"jsonargparse is not installed; kvtrie {command} needs: pip install 'kvtrie[train]'"
        ) from error
    parser: Any = jsonargparse.ArgumentParser(
        prog=f"kvtrie {command}",
        description=summary[:1].upper() + summary[1:] + ".",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file with these keys")
    return parser


def read(parser: Any, words: Sequence[str]) -> Any:  # noqa: ANN401 - a parser and a namespace
    """Return the settings in the arguments.

    Raises:
        ConfigError: an invalid argument.
    """
    import jsonargparse

    try:
        return parser.parse_args(list(words))
    except jsonargparse.ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def add_settings(parser: Any, kind: type, name: str) -> None:  # noqa: ANN401 - jsonargparse's
    """Add `--NAME.*`, the fields of a class of settings."""
    parser.add_class_arguments(kind, name)
    about, meanings = _explained(kind)
    _head(parser, name, about)
    for action in parser.groups[name]._group_actions:  # noqa: SLF001 - has no public name
        field = action.dest.rpartition(".")[2]
        action.help = meanings.get(field, action.help)


def add_data(parser: Any, default: Any = None) -> None:  # noqa: ANN401 - jsonargparse's
    """Add `--data NAME` with `--data.*`, the arguments of the named class."""
    from kvtrie.train import DataModule

    default = default or {"class_path": "LongBenchV2"}
    parser.add_subclass_arguments(DataModule, "data", default=default)
    _head(parser, "data", "the data set, and what all data sets take")
    _list_keys(parser.groups["data"], DataModule)
    for kind in _below(DataModule):
        about, _ = _explained(kind)
        _list_keys(parser.add_argument_group(f"data {kind.__name__}", about), kind)


def _head(parser: Any, name: str, about: str) -> None:  # noqa: ANN401 - jsonargparse's
    """Set title and description of a group of arguments made by jsonargparse."""
    group = parser.groups[name]
    group.title, group.description = name, about


def _list_keys(group: Any, kind: type) -> None:  # noqa: ANN401 - jsonargparse's
    """List `--data.*` of a class in the help. The argument `--data` parses them."""
    _, meanings = _explained(kind)
    for each in own_arguments(kind):
        shown = argparse.Action(
            [f"--data.{each.name}"],
            f"data.{each.name}",
            metavar=each.name.upper(),
            required=each.default is each.empty,
            default=argparse.SUPPRESS if each.default is each.empty else each.default,
            help=meanings.get(each.name, ""),
        )
        group._group_actions.append(shown)  # noqa: SLF001 - has no public name


def own_arguments(kind: type) -> list[inspect.Parameter]:
    """Return the keyword arguments of a class's own constructor, without its base's arguments."""
    if "__init__" not in vars(kind):
        return []
    found = inspect.signature(kind.__init__).parameters.values()
    return [each for each in found if each.kind is each.KEYWORD_ONLY]


def _below(kind: type) -> list[type]:
    """Return all direct and indirect subclasses of a class."""
    kinds = [kind]
    for each in kinds:
        kinds.extend(each.__subclasses__())
    return kinds[1:]


def _explained(kind: type) -> tuple[str, dict[str, str]]:
    """Return the first sentence of a class's docstring, and its text for each argument."""
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
    meanings: dict[str, str] = {}
    name = ""
    starts = [at for at, line in enumerate(lines) if line in {"Args:", "Attributes:"}]
    for line in lines[starts[0] + 1 :] if starts else ():
        if not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line)
        name, text = entry.groups() if entry else (name, f"{meanings[name]} {line.strip()}")
        meanings[name] = text
    about = " ".join(lines[: lines.index("")] if "" in lines else lines)
    return about, {
        name: text.removesuffix(".").replace("%", "%%") for name, text in meanings.items()
    }


def arguments(given: Any) -> dict[str, Any]:  # noqa: ANN401 - a namespace
    """Return the keys of a namespace, by name."""
    return dict(given.as_dict())


def chosen_data(given: Any) -> Any:  # noqa: ANN401 - a namespace, a DataModule
    """Return the data module named by `--data NAME --data.*`.

    Raises:
        ConfigError: arguments refused by the data module.
    """
    found: Any = locate(str(given.class_path))
    more = given.get("init_args")
    return found(**({} if more is None else arguments(more)))
