"""Code: descriptions of the functions, classes and settings of a model's computation.

Code of an installed package is described by its package and its qualified name. The version of the
package is part of the name of the model. Code outside packages is described by its instructions,
constants, defaults, the content of its closure, and the globals it reads.
Invariant: a description is equal in every process, and `Encoding` encodes or refuses each of its
values. Cost: some microseconds per function.
"""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AttentionInterface, PreTrainedConfig

from kvtrie.engines.identity.model_fields import excluded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Description", "attention_of", "globals_of", "package_of", "version_of"]

_NUMBERS = (bool, int, float, complex, torch.dtype)
_SCALARS = (*_NUMBERS, str, bytes)
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
_SITES = frozenset({"site-packages", "dist-packages"})
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
# Members about the definition of a class, without effect on its behaviour.
_BOOKS = frozenset(
    {
        "__abstractmethods__",
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)


class Description:
    """Descriptions of the values of a model.

    Args:
        paths: the path of each module of the model, by its `id`.

    Attributes:
        packages: installed packages of the described code.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._paths = paths
        self._above: list[int] = []  # ids of the objects containing the current object
        self._described: dict[int, object] = {}  # of configurations and classes
        self.packages: set[str] = set()

    def of(self, value: Any) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 - a branch per kind
        """Describe a value. A value of an unknown kind is returned unchanged."""
        if isinstance(value, torch.nn.Module):
            return ["module", self._paths.get(id(value)) or self._once(value, self._module)]
        if isinstance(value, PreTrainedConfig):
            return self._once(value, self._config)
        if isinstance(value, FunctionType):
            return self._once(value, self._function)
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, functools.partial):
            whole = cast("functools.partial[Any]", value)
            return ["partial", self.of(whole.func), self.of(whole.args), self.of(whole.keywords)]
        if isinstance(value, type):
            return self._once(value, self._class)
        if isinstance(value, (staticmethod, classmethod)):
            whole = cast("Any", value)
            return [type(whole).__name__, self.of(whole.__func__)]
        if isinstance(value, (property, functools.cached_property)):
            parts = [getattr(cast("Any", value), name, None) for name in ("fget", "fset", "func")]
            return ["property", *map(self.of, parts)]
        if isinstance(value, _BUILT_IN):
            return ["built in", f"{getattr(value, '__module__', None)}.{value.__qualname__}"]
        if isinstance(value, _OPERATORS):
            return ["operator", str(cast("Any", value))]
        if isinstance(value, ModuleType):
            return ["python module", value.__name__]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, dict):
            entries = cast("dict[object, object]", value).items()
            return {key: self.of(one) for key, one in entries}
        if isinstance(value, list) or type(cast("object", value)) is tuple:
            return [self.of(one) for one in cast("list[object]", value)]
        return value

    def kinds(self, classes: Iterable[type], spaces: Iterable[ModuleType]) -> object:
        """Describe the classes of modules, and the Python modules of their functions.

        Classes and functions of installed packages are described by little more than names, enough
        to detect replaced functions.
        """
        described: dict[str, object] = {}
        for one in classes:
            members = self._members(one) if package_of_class(one) else self.of(one)
            described[f"class {one.__module__}.{one.__qualname__}"] = members
        for space in spaces:
            if package_of_file(getattr(space, "__file__", None)):
                described[f"module {space.__name__}"] = self._members(space)
        return described

    def _once(self, value: object, describe: Any) -> object:  # noqa: ANN401 - a method
        """Describe an object with possible references to itself."""
        if id(value) in self._described:
            return self._described[id(value)]
        if id(value) in self._above:
            return ["contains itself", self._above[::-1].index(id(value))]
        self._above.append(id(value))
        try:
            found = describe(value)
        finally:
            self._above.pop()
        if isinstance(value, (PreTrainedConfig, type)):
            self._described[id(value)] = found
        return found

    def _members(self, owner: type | ModuleType) -> dict[str, object]:
        """Describe the functions and numbers of an installed class or Python module."""
        found: dict[str, object] = {}
        for name, one in list(vars(owner).items()):
            if excluded(owner, name):
                continue
            if isinstance(one, _NUMBERS) and not name.startswith("__"):
                found[name] = one
            elif isinstance(one, (FunctionType, staticmethod, classmethod, property)):
                found[name] = self.of(one)
        return found

    def _function(self, one: FunctionType) -> object:
        package = package_of(one)
        cells = [_content(cell) for cell in one.__closure__ or ()]
        if package is not None:
            self.packages.add(package)
            # The function wrapped by a decorator. Further cells belong to the package.
            bare = [getattr(each, "__func__", getattr(each, "func", each)) for each in cells]
            inner = [self.of(each) for each in bare if isinstance(each, (*_SCALARS, FunctionType))]
            return [package, one.__module__, one.__qualname__, one.__code__.co_qualname, inner]
        return {
            "code": one.__code__,
            "defaults": self.of([one.__defaults__, one.__kwdefaults__]),
            "closure": self.of(cells),
            "globals": self.of(globals_of(one)),
        }

    def _class(self, one: type) -> object:
        package = package_of_class(one)
        if package is not None:
            self.packages.add(package)
            return ["class", package, f"{one.__module__}.{one.__qualname__}"]
        members = {
            name: self.of(each)
            for name, each in vars(one).items()
            if not (name in _BOOKS or excluded(one, name) or isinstance(each, _SLOTS))
        }
        return ["class", [self.of(base) for base in one.__bases__], members]

    def _module(self, one: torch.nn.Module) -> object:
        """Describe a module outside the model's tree."""
        own = {name: self.of(each) for name, each in vars(one).items() if not excluded(one, name)}
        inside = {name: self.of(each) for name, each in own.pop("_modules", {}).items()}
        tensors = {**vars(one)["_parameters"], **vars(one)["_buffers"]}
        return [self.of(type(one)), own, inside, tensors]

    def _config(self, one: PreTrainedConfig) -> object:
        own = {name: self.of(each) for name, each in vars(one).items() if not excluded(one, name)}
        return [type(one).__name__, own, self.of(attention_of(one))]


def attention_of(config: PreTrainedConfig) -> object:
    """Return the attention function named in a configuration, or None for the model's own."""
    known = cast("Any", AttentionInterface())
    return known.get(getattr(config, "_attn_implementation", None))


def package_of(function: FunctionType) -> str | None:
    """Return the installed package of a function's code, or None."""
    file = function.__code__.co_filename
    if file.startswith("<"):  # generated, for example a method of a dataclass
        module = sys.modules.get(function.__module__)
        return None if module is None else package_of_file(getattr(module, "__file__", None))
    return package_of_file(file)


def package_of_class(one: type) -> str | None:
    """Return the installed package of a class, or None."""
    if one.__module__ == "builtins":
        return "python"
    module = sys.modules.get(one.__module__)
    return None if module is None else package_of_file(getattr(module, "__file__", None))


@functools.cache
def package_of_file(file: str | None) -> str | None:
    """Return the installed package of a file, "python" for the standard library, or None."""
    if file is None:
        return None
    path = Path(file).resolve()
    for name, root in _roots():
        if path.is_relative_to(root):
            inner = path.relative_to(root)
            if name is not None:
                return None if _SITES.intersection(inner.parts) else name
            top = inner.parts[0].removesuffix(".py")
            return None if version_of(top) is None else top
    return None


@functools.cache
def _roots() -> list[tuple[str | None, Path]]:
    """Return folders of code with their package (None for several), inner folders first."""
    names = {"purelib": None, "platlib": None, "stdlib": "python"}
    paths = [(name, Path(sysconfig.get_path(path)).resolve()) for path, name in names.items()]
    return [("kvtrie", Path(__file__).resolve().parents[2]), *paths]


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None if it has no version."""
    if package == "python":
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    stated = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(stated, str):
        return str(stated)
    names = metadata.packages_distributions().get(package, [])
    return ", ".join(sorted(f"{name} {metadata.version(name)}" for name in names)) or None


def globals_of(function: FunctionType) -> dict[str, object]:
    """Return the globals a function's code may read, sorted by name.

    For a Python module outside installed packages, this includes attributes of the module.
    """
    names, found = _names(function.__code__), dict[str, object]()
    for name in names:
        if name in function.__globals__:
            found[name] = one = function.__globals__[name]
            if isinstance(one, ModuleType) and not package_of_file(getattr(one, "__file__", None)):
                found |= {f"{name}.{each}": vars(one)[each] for each in names if each in vars(one)}
    return found


def _names(code: CodeType) -> list[str]:
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found.update(_names(each))
    return sorted(found)


def _content(cell: Any) -> object:  # noqa: ANN401 - a cell of a closure
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
