"""ModelState: a snapshot of a model for detecting changes quickly.

It covers the same parts as `fingerprint`, by identity and by plain values, and reads no tensor.
Invariant: two states of a model are equal only if nothing in its name has changed. A state keeps no
model alive. Cost: some microseconds per module.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedConfig

from kvtrie.engines.identity.code import attention_of, globals_of, package_of
from kvtrie.engines.identity.model_fields import (
    CONFIGS,
    MODULES,
    TORCH_MODULE_FIELDS,
    follows_length,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ModelCache", "ModelState", "own_tensors", "python_modules"]

_T = TypeVar("_T")
_ATOMS = frozenset({
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
})  # fmt: skip
_LEFT_OUT = frozenset(TORCH_MODULE_FIELDS) | frozenset(MODULES)
_WANTED: dict[tuple[str, ...], Sequence[str]] = {}  # included names, by all names
# Python modules with functions called by the forwards of many models.
_SPACES = (
    "torch.nn.functional",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
)


@dataclass(slots=True)
class ModelState:
    """The state of a model, made by `of`.

    Attributes:
        tensors: the identity and the version of each tensor.
        facts: identities and values of everything else.
        code: members of the classes of its modules and of their Python modules.
        kinds: the classes of its modules.
    """

    tensors: list[object] = field(default_factory=list[object])
    facts: list[object] = field(default_factory=list[object])
    code: list[object] = field(default_factory=list[object])
    kinds: dict[type, None] = field(default_factory=dict[type, None])
    _seen: dict[int, object] = field(default_factory=dict[int, object])
    _refs: list[object] = field(default_factory=list[object])

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelState:
        """Take the state of a model, in a walk over its modules."""
        made = cls()
        left = [model]
        while left:
            module = left.pop()
            left += made._module(module)
        for owner in (*made.kinds, *python_modules(made.kinds)):
            for one in _foreign(owner):
                made._function(one)
            made.code += vars(owner).values()
        made._seen.clear()  # it refers to parts of the model
        return made

    def same(self, other: ModelState) -> bool:
        """Return whether nothing has changed between two states."""
        return self.same_tensors(other) and (
            self.facts == other.facts
            and len(self.code) == len(other.code)
            and all(map(is_, self.code, other.code))
        )

    def same_tensors(self, other: ModelState) -> bool:
        """Return whether no tensor has changed between two states."""
        return self.tensors == other.tensors

    def _module(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Record a module. Return the modules to visit next."""
        if id(module) in self._seen:
            return []
        self._seen[id(module)] = None  # the walk holds the model
        own, kind, facts = vars(module), type(module), self.facts
        if kind not in self.kinds:
            self.kinds.update(dict.fromkeys(kind.__mro__[:-1]))
        names = tuple(own)
        wanted = _WANTED.get(names)
        if wanted is None:
            wanted = _WANTED[names] = tuple(name for name in names if name not in _LEFT_OUT)
        facts += (kind, wanted)
        tensors = own["_parameters"].values()
        if own["_buffers"]:
            rope = own.get("rope_type")
            wanted = [name for name in wanted if not follows_length(rope, name)]
            tensors = [tensor for _, tensor in own_tensors(own)]
        for tensor in tensors:
            if tensor is not None:
                self._tensor(tensor)
        for name in wanted:
            value = own[name]
            self._note(value)
        inside = own["_modules"]
        if not inside:
            return []
        facts += inside
        return [one for one in inside.values() if one is not None]

    def _tensor(self, tensor: torch.Tensor) -> None:
        # The id of a weak reference is unique while the reference is kept.
        weak = ref(tensor)
        self._refs.append(weak)
        # Inference tensors have no version: use a unique object.
        version = object() if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.tensors += (id(weak), version, tensor.data_ptr())

    def _note(self, value: Any) -> None:  # noqa: ANN401 - of any kind
        """Record a value and its contents."""
        kind = type(cast("object", value))
        if kind in _ATOMS:
            self.facts += (kind, value)
            return
        if id(value) in self._seen:  # most often a configuration, recorded with its reference
            self.facts.append(id(value))
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value)
            return
        self.facts.append(kind)
        if isinstance(value, (list, tuple)):
            self.facts.append(len(cast("list[object]", value)))
            for one in cast("list[object]", value):
                self._note(one)
        elif isinstance(value, dict):
            for key, one in cast("dict[object, object]", value).items():
                self.facts.append(key)
                self._note(one)
        elif isinstance(value, (set, frozenset)):
            self.facts.append(frozenset(cast("set[object]", value)))
        else:
            self._object(value)

    def _object(self, value: Any) -> None:  # noqa: ANN401 - of any kind
        """Record an object by its identity, and its contents once."""
        if isinstance(value, MethodType):  # a new object on each access
            self._note(value.__func__)
            self._note(value.__self__)
            return
        try:
            kept: object = ref(value)
        except TypeError:
            kept = value
        self._refs.append(kept)
        self.facts.append(id(kept))
        if isinstance(value, torch.nn.Module):
            for one in self._module(value):
                self._object(one)
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            if package_of(value) is None:
                self._function(value)
        elif isinstance(value, functools.partial):
            whole = cast("functools.partial[Any]", value)
            self._note([whole.func, whole.args, whole.keywords])
        elif not isinstance(value, (type, ModuleType)):
            self._attributes(value)

    def _attributes(self, value: object) -> None:
        """Record the attributes of an object, for example a configuration."""
        excluded = CONFIGS if isinstance(value, PreTrainedConfig) else ()
        for name, one in getattr(value, "__dict__", {}).items():
            if name not in excluded:
                self.facts.append(name)
                self._note(one)
        if isinstance(value, PreTrainedConfig):
            self._note(attention_of(value))

    def _function(self, one: FunctionType) -> None:
        """Record the code and the captured values of a function outside installed packages."""
        self.facts += (id(one.__code__), len(globals_of(one)))
        self._refs.append(one.__code__)
        self._note([one.__defaults__, one.__kwdefaults__])
        for cell in one.__closure__ or ():
            try:
                self._note(cell.cell_contents)
            except ValueError:  # not filled yet
                self.facts.append(None)
        for value in globals_of(one).values():
            self._note(value)


class ModelCache(Generic[_T]):
    """Cached results about models, each valid until its model changes."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[torch.nn.Module, tuple[ModelState, _T]] = WeakKeyDictionary()

    def get(self, model: torch.nn.Module, state: ModelState | None = None) -> _T | None:
        """Return the cached result about an unchanged model, or None.

        Args:
            model: the model.
            state: its current state, if the caller already has it.
        """
        found = self._found.get(model)
        if found is None or not found[0].same(state or ModelState.of(model)):
            return None
        return found[1]

    def put(self, model: torch.nn.Module, found: _T) -> None:
        """Cache a result about a model. It must not refer to the model."""
        self._found[model] = ModelState.of(model), found

    def forget(self, model: torch.nn.Module) -> None:
        """Forget the result about a model."""
        self._found.pop(model, None)


def own_tensors(own: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module itself, given its attributes."""
    found = own["_parameters"].items()
    if own["_buffers"]:
        rope = own.get("rope_type")
        buffers = own["_buffers"].items()
        found = (*found, *((name, one) for name, one in buffers if not follows_length(rope, name)))
    return [(name, one) for name, one in found if one is not None]


def python_modules(kinds: Iterable[type]) -> list[ModuleType]:
    """Return the Python modules of classes, and modules with functions they often call."""
    names = {*_SPACES, *(one.__module__ for one in kinds)}
    return [module for name in sorted(names) if (module := sys.modules.get(name)) is not None]


_FOREIGN: WeakKeyDictionary[Any, tuple[list[object], list[FunctionType]]] = WeakKeyDictionary()


def _foreign(owner: type | ModuleType) -> list[FunctionType]:
    """Return the member functions from outside installed packages."""
    members = list(vars(owner).values())
    before, found = _FOREIGN.get(owner, ([], []))
    if len(before) != len(members) or not all(map(is_, before, members)):
        functions = [getattr(one, "__func__", one) for one in members]
        found = [
            one for one in functions if isinstance(one, FunctionType) and package_of(one) is None
        ]
        _FOREIGN[owner] = members, found
    return found
