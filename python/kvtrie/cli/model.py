"""MODEL on the command line: one function that finds a model by what was written.

Invariant: `tiny` and `smollm2` need no network; a folder is read as it is. Cost: loading the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.demo.model import Speaker

__all__ = ["DEVICE", "MODEL", "device", "resolve"]

MODEL = "a name on the Hugging Face Hub, a folder, a run's out_dir, smollm2, or tiny (random)"
"""Help text of MODEL."""

DEVICE = "where the model runs, such as cpu, cuda:1 or 1; the first accelerator by default"
"""Help text of --device."""


def device(given: str | None) -> str:
    """Return the device that is named, or else the first accelerator, or else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    try:
        from kvtrie.demo.device import device as found
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; models need: pip install 'kvtrie[hf,cli]'"
        ) from error
    return found(given)


def resolve(name: str) -> Speaker:
    """The model and tokenizer of a name on the Hub or a folder; `smollm2` and `tiny` as well.

    The folder of a fine-tuning run is the model as the run left it.

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
    if (Path(name) / "run.json").is_file():
        from kvtrie.train.saved import Saved

        saved = Saved(Path(name))
        about = saved.about()
        if about is not None and about.model and about.model != name:
            speaker = resolve(about.model)
            return replace(speaker, name=name, model=saved.merged(speaker.model))
    return from_name(name)
