"""MODEL on the command line: one function that finds a model by what was written.

Invariant: `tiny` and `smollm2` need no network; a folder is read as it is. Cost: loading the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.demo.model import Speaker

__all__ = ["MODEL", "resolve"]

MODEL = "a name on the Hugging Face Hub, a folder, smollm2, or tiny (a random model)"
"""What MODEL may be."""


def resolve(name: str) -> Speaker:
    """The model and tokenizer of a name on the Hub or a folder; `smollm2` and `tiny` as well.

    Raises:
        ConfigError: there is none, or an extra is missing.
    """
    try:
        from rich.console import Console

        from kvtrie.demo.model import from_name, smollm, tiny
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; models need: pip install 'kvtrie[hf,cli]'"
        ) from error
    if name == "tiny":
        return tiny(heads=4)  # of 16 numbers each, the fewest that are quantised
    if name == "smollm2":
        return smollm(Console(stderr=True))
    return from_name(name)
