"""Adapters: the content of each adapter as vLLM has loaded it, in the scheduler's process.

vLLM reads the files of an adapter when a request first names it, on a call that loads it, and
with each request whose `load_inplace` is set. The digest of the files is taken then; later requests
compare their sizes and times only.
Invariant: a name is given only while the files are what was loaded. Once they have changed and vLLM
has not reloaded them, it may compute with either, so no block of the adapter is found or stored.
Cost: a `stat` of each file per request; a pass over the files when they are new.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.engines.weights import files_digest
from kvtrie.printable import printable

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows
_FILES = ("adapter_*", "new_embeddings*")


class Adapters:
    """Digests of loaded adapters, by vLLM's adapter ids."""

    def __init__(self) -> None:
        self._loaded: dict[int, str] = {}
        self._files: dict[str, tuple[object, str]] = {}
        self._reported: set[tuple[int, str]] = set()

    def name(self, adapter: LoRARequest) -> str | None:
        """Return the name of an adapter's content; None if it is not known."""
        now = self._digest(adapter)
        loaded = self._loaded.setdefault(adapter.lora_int_id, now)
        if now and now == loaded:
            return now
        if (adapter.lora_int_id, now) not in self._reported:
            self._reported.add((adapter.lora_int_id, now))
            _LOG.warning(
                "kvtrie: KV of adapter %s is neither found nor kept: its files in %s %s",
                printable(adapter.lora_name, in_ascii=True),
                printable(adapter.lora_path, in_ascii=True),
                "have changed since it was loaded" if now else "cannot be read",
            )
        return None

    def reload(self, adapter: LoRARequest) -> bool:
        """Note that a request has vLLM load its adapter, if it says so; whether it is another."""
        return adapter.load_inplace and self.loaded(adapter)

    def loaded(self, adapter: LoRARequest) -> bool:
        """Note that vLLM loads an adapter; whether it replaces another of its number.

        vLLM reads no files if an adapter of that id is loaded and need not be replaced.
        """
        before = self._loaded.get(adapter.lora_int_id)
        if before is None or adapter.load_inplace:
            self._loaded[adapter.lora_int_id] = self._digest(adapter)
        return before is not None and before != self._loaded[adapter.lora_int_id]

    def removed(self, ident: int) -> None:
        """Forget an adapter: vLLM reads its files when it comes back."""
        self._loaded.pop(ident, None)

    def _digest(self, adapter: LoRARequest) -> str:
        """The digest of the files now; empty if there are none that can be read."""
        try:
            folder = _folder(adapter.lora_path)
            files = sorted({file for kind in _FILES for file in folder.glob(kind)})
            stats = [file.stat() for file in files]
            seen = [(one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats]
            if not files:
                return ""
            cached = self._files.get(adapter.lora_path)
            if cached is not None and cached[0] == seen:
                return cached[1]
            digest = f"{files_digest(files).hex()} {adapter.is_3d_lora_weight}"
        except (OSError, ValueError):
            return ""
        self._files[adapter.lora_path] = (seen, digest)
        return digest


def _folder(path: str) -> Path:
    """The folder of an adapter: on this machine, or a snapshot of the hub that is."""
    folder = Path(path).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType] - its own

    return Path(snapshot_download(path, local_files_only=True))
