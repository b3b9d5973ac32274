"""Calls that a signature takes and refuses, of an engine's functions and of kvtrie's overrides."""

from __future__ import annotations

import inspect
import types

import pytest

from kvtrie.engines.server.signatures import (
    given,
    plain,
    refused_calls,
    refused_overrides,
    signature_of,
    takes,
)


def called(text):
    """The signature of a function with these parameters."""
    space = {}
    exec(f"def function({text}): ...", space)  # noqa: S102 - text of this file
    return inspect.signature(space["function"])


@pytest.mark.parametrize(
    ("callee", "caller"),
    [
        ("a, b", "a, b"),
        ("a, b, c=0", "a, b"),
        ("a, b=0", "a, b=0"),
        ("*args, **kwargs", "a, b, *, c"),
        ("a, **kwargs", "a, *, b"),
        ("a, *args, **kwargs", "a, b, *args, **kwargs"),
        ("a, b, *, c=0", "a, b, /"),
        ("a, *args", "a, b"),
    ],
)
def test_calls_that_are_taken(callee, caller):
    assert takes(called(callee), called(caller))


@pytest.mark.parametrize(
    ("callee", "caller"),
    [
        ("a", "a, b"),
        ("a, b, c", "a, b"),
        ("a, b", "b, a"),
        ("a, c", "a, b"),
        ("a, b", "a, b=0"),  # a caller may leave b out
        ("a, *, b", "a, b"),  # a caller may give b by place
        ("a, b, /", "a, b"),  # a caller may give b by name
        ("a", "a, *, b=0"),
        ("a", "a, *args"),
        ("a, *args", "a, **kwargs"),
    ],
)
def test_calls_that_are_refused(callee, caller):
    assert not takes(called(callee), called(caller))


class Base:
    def __init__(self, size, *, kind=None):
        self.size, self.kind = size, kind

    def put(self, key, value, context=None):
        pass

    def get(self, key):
        pass

    @classmethod
    def of(cls, text):
        pass

    @staticmethod
    def join(*parts):
        pass

    field = 3


class Ours(Base):
    def put(self, key, value):
        pass

    @classmethod
    def of(cls, text, more=0):
        pass


def test_a_method_is_called_without_its_object():
    assert plain(signature_of(Base, "__init__")) == "(size, kind=)"
    assert plain(signature_of(Base, "put")) == "(key, value, context=)"
    assert plain(signature_of(Base, "of")) == "(text)"
    assert plain(signature_of(Base, "join")) == "(*parts)"
    assert signature_of(Base, "field") is None
    assert signature_of(Base, "absent") is None
    module = types.ModuleType("module")
    module.call = lambda self, **more: (self, more)
    assert plain(signature_of(module, "call")) == "(self, **more)"
    assert signature_of(type("Bare", (dict,), {}), "__init__") is None  # a class of C code


def test_an_override_that_refuses_a_call_is_named_with_both_signatures():
    assert refused_overrides(Ours, Base, ("__init__", "put", "get", "of", "join", "field")) == {
        "put": "called as (key, value, context=), kvtrie has (key, value)"
    }


def test_a_call_that_is_refused_is_named_with_both_signatures():
    assert refused_calls(Base, {"__init__": "size, kind=", "put": "key, value", "gone": ""}) == {}
    assert refused_calls(Base, {"__init__": "size, kind", "of": ""}) == {
        "__init__": "is (size, kind=), kvtrie gives (size, kind)",
        "of": "is (text), kvtrie gives ()",
    }
    with pytest.raises(ValueError, match="wrong parameter order"):
        given("a=, b")
