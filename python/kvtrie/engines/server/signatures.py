"""Checks signatures of calls between kvtrie and an engine.

A method of kvtrie overriding an engine's method must take every call allowed by the engine's
signature. A function of the engine must take the arguments passed by kvtrie.
Cost: microseconds per pair.
"""

from __future__ import annotations

import inspect
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["given", "plain", "refused_calls", "refused_overrides", "signature_of", "takes"]

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_STARS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def given(arguments: str) -> Signature:
    """Return the signature of a call, from its arguments: `a, b=` gives `a` by place, `b` by name.

    Raises:
        ValueError: an argument by place after an argument by name.
    """
    names = [each.strip() for each in arguments.split(",") if each.strip()]
    return Signature(
        [
            Parameter(
                name.rstrip("="),
                Parameter.KEYWORD_ONLY if name.endswith("=") else Parameter.POSITIONAL_ONLY,
            )
            for name in names
        ]
    )


def signature_of(owner: Any, name: str) -> Signature | None:  # noqa: ANN401 - a class or a module
    """Return the signature of a class's method or a module's function, None for a field.

    Without `self`, `cls` and annotations. `__init__` gives the signature for calling the class.
    """
    raw: Any = inspect.getattr_static(owner, name, None)
    called: Any = owner if name == "__init__" else getattr(raw, "__func__", raw)
    if name != "__init__" and not inspect.isfunction(called):
        return None
    bound = inspect.isclass(owner) and called is not owner and not isinstance(raw, staticmethod)
    try:
        parameters = [*inspect.signature(called).parameters.values()][int(bound) :]
    except (TypeError, ValueError):  # a class of C code
        return None
    return Signature([each.replace(annotation=Parameter.empty) for each in parameters])


def plain(signature: Signature) -> str:
    """Return the names of parameters, with `=` after optional parameters."""
    parts: list[str] = []
    for each in signature.parameters.values():
        stars = "*" * (1 + _STARS.index(each.kind)) if each.kind in _STARS else ""
        parts.append(f"{stars}{each.name}{'' if each.default is Parameter.empty else '='}")
    return f"({', '.join(parts)})"


def takes(callee: Signature, caller: Signature) -> bool:
    """Return whether `callee` takes every call allowed by `caller`."""
    known = callee.parameters
    places = [each.name for each in known.values() if each.kind in _BY_PLACE]
    kinds = {each.kind for each in known.values()}
    rest, more = Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds
    for at, each in enumerate(caller.parameters.values()):
        ours = known.get(each.name)
        placed = rest or places[at : at + 1] == [each.name]
        named = more or (ours is not None and ours.kind in _BY_NAME)
        if not {
            Parameter.POSITIONAL_ONLY: placed,
            Parameter.POSITIONAL_OR_KEYWORD: placed and (named or rest),
            Parameter.KEYWORD_ONLY: named,
            Parameter.VAR_POSITIONAL: rest,
            Parameter.VAR_KEYWORD: more,
        }[each.kind]:
            return False
    always = {each.name for each in caller.parameters.values() if each.default is Parameter.empty}
    return all(
        each.kind in _STARS or each.default is not Parameter.empty or each.name in always
        for each in known.values()
    )


def refused_overrides(ours: type, base: type, names: Iterable[str]) -> dict[str, str]:
    """Return the methods of `base` overridden with a signature that refuses calls.

    Args:
        ours: a class of kvtrie.
        base: its base class from the engine.
        names: methods of `base`. Methods not overridden by `ours` are skipped.

    Returns:
        By name, the signatures of the engine's method and of kvtrie's method.
    """
    refused: dict[str, str] = {}
    for name in names:
        if name == "__init__" or inspect.getattr_static(ours, name, None) is (
            inspect.getattr_static(base, name, None)
        ):
            continue
        theirs, mine = signature_of(base, name), signature_of(ours, name)
        if theirs is not None and mine is not None and not takes(mine, theirs):
            refused[name] = f"called as {plain(theirs)}, kvtrie has {plain(mine)}"
    return refused


def refused_calls(owner: Any, calls: Mapping[str, str]) -> dict[str, str]:  # noqa: ANN401 - a class or a module
    """Return the methods or functions of an engine that refuse kvtrie's arguments.

    Args:
        owner: the engine's class or module.
        calls: arguments by name, in the syntax of `given`.

    Returns:
        By name, the signature and kvtrie's arguments.
    """
    refused: dict[str, str] = {}
    for name, arguments in calls.items():
        theirs = signature_of(owner, name)
        if theirs is not None and not takes(theirs, given(arguments)):
            refused[name] = f"is {plain(theirs)}, kvtrie gives ({arguments})"
    return refused
