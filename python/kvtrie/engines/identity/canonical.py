"""Encode configuration values canonically: equal values have equal bytes in every process.

A name of stored KV is a digest of these bytes. Each value is encoded with its type and its length,
so `1`, `1.0`, `True` and `"1"` differ, and no two different values have the same bytes. Lists and
tuples are encoded alike, because JSON turns the tuples of a saved configuration into lists.
Invariant: a value is encoded completely or refused. `repr` is never used, because it can contain a
memory address.
Cost: about a microsecond per value, and a pass over the bytes of tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch

from kvtrie.engines.identity.weights import digest as tensors_digest
from kvtrie.errors import ConfigError

__all__ = ["Encoding"]

_UNSET = object()
_DERIVED = (property, functools.cached_property)


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """A canonical encoding of values, with the classes and the exclusions of an engine.

    Dataclasses, pydantic models and named tuples are encoded field by field with the name of
    their class. Attributes added to an object count as fields. Properties do not.

    Attributes:
        excluded: fields to leave out, each as "Class.field". A class includes its subclasses.
        records: further classes to encode by all attributes of their objects.
    """

    excluded: Collection[str] = ()
    records: tuple[type, ...] = ()

    def encode(self, value: object, path: str) -> bytes:
        """Return the bytes of a value.

        Args:
            value: any value.
            path: the name of the value, for errors.

        Raises:
            ConfigError: a value without an encoding, or containing itself. The error has the path
                of the field.
        """
        return self._encode(value, path, ())

    def digest(self, value: object, path: str) -> str:
        """Return the digest of a value, as 64 hexadecimal digits.

        Raises:
            ConfigError: as in `encode`.
        """
        return hashlib.blake2b(self.encode(value, path), digest_size=32).hexdigest()

    def _encode(self, value: object, path: str, above: tuple[int, ...]) -> bytes:
        try:
            plain = _plain(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if plain is not None:
            return plain
        if id(value) in above:
            raise ConfigError(f"{path} contains itself: kvtrie cannot encode it into a name of KV")
        above = (*above, id(value))
        if _is(value, Mapping):
            entries = cast("Mapping[object, object]", value).items()
            pairs = [
                self._encode(key, f"a key of {path}", above)
                + self._encode(one, f"{path}[{_short(key)}]", above)
                for key, one in entries
            ]
            return _tagged("map", *sorted(pairs))
        if _is(value, AbstractSet):
            members = [self._encode(one, f"a member of {path}", above) for one in _each(value)]
            return _tagged("set", *sorted(members))
        if _is(value, list, tuple) and not hasattr(value, "_fields"):
            rows = enumerate(_each(value))
            return _tagged("list", *(self._encode(one, f"{path}[{at}]", above) for at, one in rows))
        parts = _parts_of_code(value)
        if parts is None:
            parts = self._fields(value)
        if parts is None:
            raise ConfigError(
                f"{path} is of type {_name(type(value))}, for which kvtrie has no canonical "
                "encoding, so it cannot be part of a name of KV"
            )
        encoded = [
            _tagged("field", _text(name), self._encode(one, f"{path}.{name}", above))
            for name, one in parts.items()
        ]
        return _tagged("record", _text(_name(type(value))), *sorted(encoded))

    def _fields(self, value: object) -> dict[str, object] | None:
        """Return the included fields of an object, or None for an unknown class."""
        kind, names = type(value), set[str]()
        if dataclasses.is_dataclass(kind):
            names |= {field.name for field in dataclasses.fields(kind)}
        elif _is(value, tuple):
            names |= set(cast("Any", value)._fields)
        elif not (hasattr(kind, "__pydantic_validator__") or isinstance(value, self.records)):
            return None
        own = {**getattr(value, "__dict__", {})}
        for more in ("__pydantic_extra__", "__pydantic_private__"):
            own |= getattr(value, more, None) or {}
        names |= {name for name in own if not isinstance(getattr(kind, name, None), _DERIVED)}
        found: dict[str, object] = {}
        for name in names:
            one = own.get(name, _UNSET)
            one = getattr(value, name, _UNSET) if one is _UNSET else one
            if one is not _UNSET and not name.startswith("__") and not self.excludes(kind, name):
                found[name] = one
        return found

    def excludes(self, kind: type, field: str) -> bool:
        """Return whether a field of a class is excluded."""
        return any(f"{each.__name__}.{field}" in self.excluded for each in kind.__mro__)


def _plain(value: object) -> bytes | None:
    """Return the bytes of a plain value, or None for a container or an object."""
    kind = type(value)
    if value is None or value is Ellipsis or value is NotImplemented:
        return _tagged(kind.__name__)
    if isinstance(value, enum.Enum):
        of = _plain(value.value) or b""  # a member with a complex value is encoded by its name only
        return _tagged("enum", _text(_name(kind)), _text(value.name or ""), of)
    for base, encode in _PLAIN:
        if isinstance(value, base):
            # A subclass of `int` or `str` can behave differently from its base.
            own = b"" if kind is base or base in _OPEN else _text(_name(kind))
            return _tagged(base.__name__, own, encode(value))
    return None


def _float(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack(">d", value)


def _array(value: Any) -> bytes:  # noqa: ANN401 - an array or a scalar of NumPy
    if value.dtype.hasobject:
        raise ConfigError("an array of Python objects has no canonical encoding")
    return _tagged(value.dtype.str, _text(str(value.shape)), np.ascontiguousarray(value).tobytes())


_PLAIN: tuple[tuple[type, Callable[[Any], bytes]], ...] = (
    (bool, lambda value: b"1" if value else b"0"),
    (np.generic, _array),
    (np.ndarray, _array),
    (int, lambda value: hex(value).encode()),
    (float, _float),
    (complex, lambda value: _float(value.real) + b" " + _float(value.imag)),
    (Fraction, lambda value: f"{value.numerator}/{value.denominator}".encode()),
    (Decimal, lambda value: str(value).encode()),
    (str, lambda value: _text(str.__str__(value))),
    (bytes, bytes),
    (bytearray, bytes),
    (memoryview, lambda value: value.tobytes()),
    (PurePath, lambda value: _text(str(value))),
    (re.Pattern, lambda value: _tagged(str(value.flags), _text(str(value.pattern)))),
    (torch.Tensor, lambda value: tensors_digest([("", value)])),
    (torch.dtype, lambda value: str(value).encode()),
    (torch.device, lambda value: str(value).encode()),
    (torch.layout, lambda value: str(value).encode()),
    (torch.memory_format, lambda value: str(value).encode()),
    (type, lambda value: _text(_name(value))),
    (BuiltinFunctionType, lambda value: _text(f"{value.__module__}.{value.__qualname__}")),
)
# Classes with subclasses of the same meaning.
_OPEN = (np.generic, np.ndarray, PurePath, type)


def _parts_of_code(value: object) -> dict[str, object] | None:
    """Return the parts of a function or of its code, or None for anything else.

    Globals read by a function are not part of it.
    """
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return {
            "name": f"{value.__module__}.{value.__qualname__}",
            "code": value.__code__,
            "defaults": [value.__defaults__, value.__kwdefaults__],
            "closure": cells,
        }
    if isinstance(value, CodeType):
        code = value.co_code, value.co_names, value.co_varnames, value.co_flags
        return {"code": code, "constants": value.co_consts}
    if isinstance(value, MethodType):
        return {"function": value.__func__, "of": value.__self__}
    if isinstance(value, functools.partial):
        whole = cast("functools.partial[Any]", value)
        return {"function": whole.func, "args": whole.args, "keywords": whole.keywords}
    return None


def _content(cell: Any) -> object:  # noqa: ANN401 - a cell of a closure
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is(value: object, *kinds: type) -> bool:
    """Call `isinstance` without narrowing by a type checker to members of unknown types."""
    return isinstance(value, kinds)


def _each(value: object) -> Iterator[object]:
    return iter(cast("Any", value))


def _tagged(tag: str, *parts: bytes) -> bytes:
    """Join a tag and parts, each with its length: different parts have different bytes."""
    return b"".join(
        (b"%d %s(" % (len(parts), tag.encode()), *(b"%d:%b" % (len(p), p) for p in parts), b")")
    )


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(key: object) -> str:
    return f"{key!r}"[:80] if isinstance(key, (str, int, float)) else type(key).__name__
