"""MODEL on the command line: finds a model by its name or path.

Invariant: `tiny` and `smollm2` need no network, and a folder is read unchanged. Cost: loading the
model.
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
    """Return the named device, or else the first accelerator, or else the CPU.

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
    """Return model and tokenizer for a name on the Hub, a folder, `smollm2` or `tiny`.

    The folder of a fine-tuning run gives the fine-tuned model.

    Raises:
        ConfigError: an unknown model, or a missing extra.
    """
    try:
        from rich.console import Console

        from kvtrie.demo.model import from_name, smollm, tiny
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; models need: pip install 'kvtrie[hf,cli]'"
        ) from error
    if name == "tiny":
        return tiny(heads=4)  # of 16 numbers each, the smallest quantised size
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
