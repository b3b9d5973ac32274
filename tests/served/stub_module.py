"""The stub of one module, written from what is installed: names, parameters and plain types."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from importlib import import_module

from kvtrie.engines.server.surface_check import members

HEAD = "# Written by tests/served/stubs.py out of the installed package: do not edit."
PLAIN = ("bool", "bytes", "dict", "float", "int", "list", "memoryview", "object", "set", "str")
PLAIN += ("tuple", "type")
ABSTRACT = ("Collection", "Iterable", "Mapping", "Sequence")
BARE = {"dict": "[Any, Any]", "list": "[Any]", "set": "[Any]", "tuple": "[Any, ...]"}
OLD = {"Dict": "dict", "List": "list", "Set": "set", "Tuple": "tuple"}
WIDE = 100
_KINDS = inspect.Parameter
_STARS = {_KINDS.VAR_POSITIONAL: "*", _KINDS.VAR_KEYWORD: "**"}


class StubModule:
    """The text of a stub.

    Args:
        name: the module's.
        homes: the module of each class that the lists name.
    """

    def __init__(self, name, homes):
        self.name, self.homes = name, homes
        self.imports, self.parts = set(), []

    def text(self):
        """All of it."""
        parts = [HEAD, "\n".join(sorted(self.imports)), *self.parts]
        return "\n\n".join(filter(None, parts)) + "\n"

    def add_name(self, name):
        """A function or a constant."""
        value = getattr(import_module(self.name), name)
        if inspect.isfunction(value):
            self.parts.append("\n".join(self._function(name, inspect.signature(value))))
            return
        classes = [each for each in type(value).__mro__ if each.__name__ in self.homes]
        self.parts.append(f"{name}: {self._named((classes or [type(value)])[0].__name__)}")

    def add_class(self, name, names):
        """A class and its members."""
        kind = getattr(import_module(self.name), name)
        bases = []
        for base in kind.__mro__[1:]:
            if base.__name__ in self.homes and not any(issubclass(one, base) for one in bases):
                bases.append(base)
        parents = [self._named(base.__name__) for base in bases]
        if issubclass(kind, enum.Enum):
            self.imports.add("from enum import Enum")
            parents += ["str", "Enum"] if issubclass(kind, str) else ["Enum"]
        head = f"class {name}({', '.join(parents)}):" if parents else f"class {name}:"
        if dataclasses.is_dataclass(kind):  # its fields here are not all that it is made of
            self.imports.add("from dataclasses import dataclass")
            head = f"@dataclass(init=False)\n{head}"
        lines = [line for each in names for line in self._member(kind, each)]
        self.parts.append(head + ("".join(f"\n    {line}" for line in lines) or " ..."))

    def _member(self, kind, name):
        raw = inspect.getattr_static(kind, name, None)
        if name == "__init__":
            lines = self._function(name, inspect.signature(kind), ["self"], "None")
        elif isinstance(raw, enum.Enum):
            lines = [f"{name} = ..."]
        elif isinstance(raw, classmethod | staticmethod):
            signature = inspect.signature(raw.__func__)
            lines = [f"@{type(raw).__name__}", *self._function(name, signature)]
        elif inspect.isfunction(raw):
            lines = self._function(name, inspect.signature(raw))
        elif callable(get := getattr(raw, "fget", getattr(raw, "func", None))):
            lines = ["@property", *self._function(name, inspect.signature(get))]
        else:
            lines = [f"{name}: {self._type(_field(kind, name))}"]
        return lines

    def _function(self, name, signature, first=(), result=None):
        parameters, before = list(first), None
        for each in signature.parameters.values():
            if each.kind is _KINDS.KEYWORD_ONLY and before not in (
                each.kind,
                _KINDS.VAR_POSITIONAL,
            ):
                parameters.append("*")
            before = each.kind
            bare = not parameters and each.name in ("self", "cls")
            typed = "" if bare else f": {self._type(each.annotation)}"
            default = "" if each.default is each.empty else " = ..."
            parameters.append(f"{_STARS.get(each.kind, '')}{each.name}{typed}{default}")
        result = result or self._type(signature.return_annotation)
        line = f"def {name}({', '.join(parameters)}) -> {result}: ..."
        if len(line) + 4 <= WIDE:
            return [line]
        return [f"def {name}(", *(f"    {each}," for each in parameters), f") -> {result}: ..."]

    def _type(self, annotation):
        """A type as a stub has it: what is not plain in it becomes `Any`."""
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if annotation is inspect.Signature.empty:
            return self._named("")
        try:
            return self._plain(ast.parse(text, mode="eval").body)
        except SyntaxError:  # how Python writes a type that has no name
            return self._named("")

    def _plain(self, node):
        if isinstance(node, ast.Constant):
            quoted = self._type(node.value) if isinstance(node.value, str) else None
            return quoted or {None: "None", ...: "..."}.get(node.value, self._named(""))
        if isinstance(node, ast.BinOp):
            return f"{self._plain(node.left)} | {self._plain(node.right)}"
        if isinstance(node, ast.Tuple):
            return ", ".join(self._plain(each) for each in node.elts)
        if isinstance(node, ast.Subscript):
            return self._of(_last(node.value), self._plain(node.slice), node.slice)
        if ast.unparse(node) == "torch.Tensor":
            self.imports.add("import torch")
            return "torch.Tensor"
        name = self._named(_last(node))
        if name in BARE:
            self._named("")
        return name + BARE.get(name, "")

    def _of(self, name, inside, node):
        """A type of types."""
        if name == "Optional":
            return f"{inside} | None"
        if name == "Union":
            return " | ".join(self._plain(each) for each in getattr(node, "elts", [node]))
        outer = self._named(name)
        return "Any" if outer == "Any" else f"{outer}[{inside}]"

    def _named(self, name):
        """A class by its bare name, imported; `Any` if neither the lists nor Python have it."""
        name = OLD.get(name, name)
        if name in self.homes and self.homes[name] != self.name:
            self.imports.add(f"from {self.homes[name]} import {name}")
        elif name in ABSTRACT:
            self.imports.add(f"from collections.abc import {name}")
        elif name not in self.homes and name not in PLAIN:
            self.imports.add("from typing import Any")
            name = "Any"
        return name


def _last(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _field(kind, name):
    """The annotation of a field: its own, or that of the argument that a method puts there."""
    for base in kind.__mro__[:-1]:
        if (annotation := inspect.get_annotations(base).get(name)) is not None:
            return annotation
    makes = [make for base in kind.__mro__[:-1] for make in vars(base).values()]
    for make in filter(inspect.isfunction, makes):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(make)))):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == f"self.{name}":
                return ast.unparse(node.annotation)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{name}":
                given = inspect.signature(make).parameters.get(ast.unparse(node.value))
                return given.annotation if given else inspect.Signature.empty
    if name not in members(kind):
        raise AttributeError(f"{kind.__module__}.{kind.__name__} has no {name}")
    return inspect.Signature.empty
