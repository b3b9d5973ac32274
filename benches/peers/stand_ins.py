"""Stand-ins that let SGLang's radix trees run without a GPU; imported before any of its modules.

The trees themselves need torch, numpy and msgspec, but their modules import half of the engine. So
packages in `BARE` lose their `__init__`, which would import the whole engine, and keep their real
submodules, and whatever is in `FAKE` becomes an empty module whose every name is a class that does
nothing. Invariant: nothing that a tree calls on our paths is faked, save the allocator: `Pool`.
Cost: none while they run.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benches.workload import BLOCK

BARE = ("sglang", "sglang.srt.distributed")
FAKE = (
    "PIL",
    "fastapi",
    "orjson",
    "pybase64",
    "pydantic",
    "pydantic_core",
    "requests",
    "starlette",
    "torchcodec",
    "torchvision",
    "transformers",
    "zmq",
    "sglang.kernels",
    "sglang.srt.layers",
    "sglang.srt.configs",
    "sglang.srt.managers.schedule_batch",
)


class Nothing(type):
    """The class of faked classes: whatever is done with one does nothing."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        """As any class; keywords say nothing."""
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        return nothing(cls, name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **_: Any) -> Any:
        """Return the decorated function, or an instance."""
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()


def nothing(owner: Any, name: str) -> Any:
    """A faked class, remembered by its owner."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = Nothing(name, (Exception,), {})
    setattr(owner, name, made)
    return made


class FakeModule(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return nothing(self, name)


class FakeFinder:
    """Finds and loads what is in `FAKE`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As the import system asks for it."""
        del path, target
        if any(name == fake or name.startswith(f"{fake}.") for fake in FAKE):
            return ModuleSpec(name, FakeFinder, is_package=True)
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return FakeModule(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing to run."""


def strip() -> None:
    """Put bare packages where the engine's would be, and the finder before all others."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent.parent
    for name in BARE:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.meta_path.insert(0, FakeFinder)  # type: ignore[arg-type]


class Pool:
    """A list of free pages with the methods that the trees call.

    SGLang's own allocator needs Triton, so taking pages is never timed; giving them back happens
    inside the trees' `evict`.
    """

    device, page_size = "cpu", BLOCK

    def __init__(self, blocks: int) -> None:
        self.pages, self.free_blocks = np.arange(blocks)[::-1].copy(), blocks

    def available_size(self) -> int:
        """Free tokens."""
        return self.free_blocks * BLOCK

    full_available_size = available_size

    def alloc(self, blocks: int) -> torch.Tensor:
        """Slots of `blocks` pages."""
        self.free_blocks -= blocks
        pages = self.pages[self.free_blocks : self.free_blocks + blocks]
        return torch.from_numpy((pages[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))

    def free(self, indices: torch.Tensor) -> None:
        """Take the pages of these slots back."""
        pages = indices.numpy()[::BLOCK] // BLOCK
        self.pages[self.free_blocks : self.free_blocks + len(pages)] = pages
        self.free_blocks += len(pages)

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0, **_: Any) -> None:
        """The same, of a part that begins on a page."""
        del start_pos
        if len(indices):
            self.free(indices)

    def mamba_full_cache_donor(self) -> None:
        """There is none."""

    def get_kvcache(self) -> None:
        """There is none."""


strip()
