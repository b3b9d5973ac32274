"""The stubs of engines have what the lists name and nothing else; how they are written."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "python" / "kvtrie" / "engines"
sys.path.append(str(ROOT / "tests" / "served"))

import stubs  # noqa: E402 - its folder comes first
from stub_module import StubModule, members  # noqa: E402 - same folder


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Place:
    at: int
    names: list[str] | None = None


class Base:
    def __init__(self, place: Place, thing: Path, count: int = 3):
        self.place, self.other = place, thing
        self.size = count * 2
        self.count = count
        self.written: dict[str, Path] = {}


class Named(Base):
    @property
    def name(self) -> str:
        return "x"

    @classmethod
    def of(cls, text: str | None = None, *, colour: Colour = Colour.RED) -> Named:
        raise NotImplementedError

    @staticmethod
    def join(*parts: bytes, **more: int) -> tuple[int, ...]:
        raise NotImplementedError

    def all(self, of: dict, what: Any, rows: list[Place]):
        return self.written, of, what, rows


def function(first: float, /, second: Path) -> None:
    raise NotImplementedError(first, second)


CONSTANT = "text"

WRITTEN = """
from dataclasses import dataclass
from enum import Enum
from typing import Any

def function(first: float, second: Any) -> None: ...

CONSTANT: str

class Colour(Enum):
    RED = ...

@dataclass(init=False)
class Place:
    def __init__(self, at: int, names: list[str] | None = ...) -> None: ...
    at: int

class Base: ...

class Named(Base):
    def __init__(self, place: Place, thing: Any, count: int = ...) -> None: ...
    size: Any
    count: int
    written: dict[str, Any]
    @property
    def name(self) -> str: ...
    @classmethod
    def of(cls, text: str | None = ..., *, colour: Colour = ...) -> Named: ...
    @staticmethod
    def join(*parts: bytes, **more: int) -> tuple[int, ...]: ...
    def all(self, of: dict[Any, Any], what: Any, rows: list[Place]) -> Any: ...
"""


LISTED = SimpleNamespace(
    USED={
        (__name__, "Colour"): ("RED",),
        (__name__, "Place"): ("__init__", "at"),
        (__name__, "Base"): (),
        (__name__, "Named"): ("__init__", "size", "count", "written", "name", "of", "join", "all"),
    },
    NAMES=((__name__, "function"), (__name__, "CONSTANT")),
)


def text_of(kinds):
    module = StubModule(__name__, {name: __name__ for _, name in kinds.USED})
    for _, name in kinds.NAMES:
        module.add_name(name)
    for (_, name), names in kinds.USED.items():
        module.add_class(name, names)
    return module.text()


def test_what_is_written():
    assert text_of(LISTED).partition("\n")[2] == WRITTEN


def test_what_is_not_there_cannot_be_written():
    with pytest.raises(AttributeError, match=r"Named has no strange"):
        StubModule(__name__, {}).add_class("Named", ["strange"])
    assert "strange" not in members(Named)
    assert {"written", "name", "size"} <= members(Named)


def test_long_lines_are_broken():
    module = StubModule(__name__, {})
    module.add_class("Named", ["of", "__init__"])
    assert max(map(len, module.text().splitlines())) <= 100
    long = "word" * 20
    written = module._function(long, inspect.signature(function), (), "None")
    assert written == [f"def {long}(", "    first: float,", "    second: Any,", ") -> None: ..."]


@pytest.mark.parametrize(
    "path", [each for name in stubs.LISTS for each in sorted(ENGINES.glob(f"{name}/*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)  # fmt: skip
def test_what_a_file_imports_of_an_engine_is_in_its_list(path):
    listed = stubs.names_of(stubs.LISTS[path.parent.name])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(path.parent.name):
            for alias in node.names:
                assert (node.module, alias.name) in listed


@pytest.mark.parametrize("engine", stubs.LISTS)
def test_the_committed_stubs_have_what_the_lists_name(engine):
    assert stubs.committed(engine)
    assert stubs.differences(stubs.LISTS[engine], stubs.committed(engine)) == []


def test_differences_are_listed():
    kinds, text = LISTED, text_of(LISTED)
    path = f"{__name__.replace('.', '/')}.pyi"
    assert stubs.differences(kinds, {path: text}) == []
    less = text.replace("    size: Any\n", "").replace("    RED = ...\n", "    ...\n")
    assert stubs.differences(kinds, {path: less}) == [
        f"{__name__}.Colour.RED is not in the stubs",
        f"{__name__}.Named.size is not in the stubs",
    ]
    more = (
        text.replace("    size: Any\n", "    size: Any\n    length: Any\n") + "\nclass More: ...\n"
    )
    assert stubs.differences(kinds, {path: more}) == [
        f"{__name__}.More is not in the list",
        f"{__name__}.Named.length is not in the list",
    ]
