"""Commands with dotted keys: a parser, its words, and what a wrong one says.

Invariant: a wrong word is one `ConfigError` of one line. Cost: jsonargparse is loaded when such a
command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_data", "arguments", "chosen_data", "make_parser", "read"]


def make_parser(command: str, summary: str) -> Any:  # noqa: ANN401 - a jsonargparse parser
    """A parser that raises instead of leaving the process.

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
    """Return the settings in the words.

    Raises:
        ConfigError: a word that cannot be.
    """
    import jsonargparse

    try:
        return parser.parse_args(list(words))
    except jsonargparse.ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def add_data(parser: Any, default: Any = None) -> None:  # noqa: ANN401 - jsonargparse's
    """Add `--data NAME` with `--data.*`, the arguments of what it names."""
    from kvtrie.train import DataModule

    default = default or {"class_path": "LongBenchV2"}
    parser.add_subclass_arguments(DataModule, "data", default=default)
    shared = [f"--data.{name}" for name in _names(DataModule)]
    lines = [f"all data sets take {', '.join(shared)}"]
    for kind in DataModule.__subclasses__():
        own = [f"--data.{name}" for name in _names(kind) if name != "more"]
        lines.append(f"{kind.__name__} takes {', '.join(own)} as well")
    parser.epilog = "; ".join(lines) + "."


def _names(kind: type) -> list[str]:
    """Return the names of a class's arguments; its `__new__` may take any."""
    import inspect

    return list(inspect.signature(kind.__init__).parameters)[1:]


def arguments(given: Any) -> dict[str, Any]:  # noqa: ANN401 - a namespace
    """The keys below one, by name."""
    return dict(given.as_dict())


def chosen_data(given: Any) -> Any:  # noqa: ANN401 - a namespace, a DataModule
    """The data module that `--data NAME --data.*` names.

    Raises:
        ConfigError: arguments that it refuses.
    """
    from kvtrie.train import DataModule

    name = str(given.class_path).rpartition(".")[2]
    kinds: list[Any] = [DataModule]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    found = next(kind for kind in kinds if kind.__name__ == name)
    more = given.get("init_args")
    return found(**({} if more is None else arguments(more)))
