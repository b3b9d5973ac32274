"""Test the canonical encoding of values that are part of a name of KV."""

import dataclasses
import enum
import functools
import json
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.errors import ConfigError

PLAIN = Encoding()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Kind(enum.IntFlag):
    A = 1
    B = 2


class Named(str):
    __slots__ = ()


class Unknown:
    def __init__(self):
        self.size = 1


@dataclasses.dataclass
class Part:
    size: int = 1
    port: int = 8000

    @functools.cached_property
    def area(self):
        return self.size**2

    @property
    def double(self):
        return 2 * self.size


@dataclasses.dataclass
class Whole(Part):
    part: Part = dataclasses.field(default_factory=Part)


@dataclasses.dataclass(slots=True)
class Slotted:
    size: int = 1


@dataclasses.dataclass
class OtherPart:
    size: int = 1
    port: int = 8000


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - a class without types


def scale(by):
    def scaled(size):
        return size * by

    return scaled


DIFFERENT = [
    None,
    ...,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    2**64 + 1,
    -(2**200),
    0.0,
    -0.0,
    1.0,
    float("nan"),
    float("inf"),
    1j,
    Fraction(1),
    Fraction(1, 3),
    Decimal(1),
    Decimal("1.0"),
    "",
    "1",
    "\ud800",
    b"1",
    bytearray(b"1"),
    Named("1"),
    Path("1"),
    np.int64(1),
    np.float64(1),
    np.array([1]),
    np.array([[1]]),
    torch.float16,
    torch.bfloat16,
    torch.device("cpu"),
    torch.tensor([1]),
    torch.tensor([1.0]),
    torch.nn.Parameter(torch.tensor([1.0])),
    Colour.RED,
    Colour.BLUE,
    Kind.A,
    Kind.A | Kind.B,
    [],
    [1],
    [[1]],
    [1, 1],
    ["1"],
    {},
    {1: 1},
    {"1": 1},
    {"1": "1"},
    {"a": {"b": 1}},
    {"a": {}, "b": 1},
    set(),
    {1},
    {1, 2},
    int,
    Part,
    len,
    Part(),
    Part(size=2),
    OtherPart(),
    Whole(),
    Whole(part=Part(port=1)),
    Slotted(),
    Slotted(2),
    Pair(1, 2),
    re.compile("1"),
    re.compile("1", re.IGNORECASE),
    scale,
    scale(1),
    scale(2),
    functools.partial(scale, 1),
    "".join,
]


def encode(value, encoding=PLAIN):
    return encoding.encode(value, "value")


def test_values_that_differ_in_type_or_content_have_different_bytes():
    encoded = {}
    for value in DIFFERENT[:-1]:  # a method of an object is the last
        assert encoded.setdefault(encode(value), value) is value, (value, encoded[encode(value)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, MappingProxyType({"a": 1})),
        ({1, 2, 3}, frozenset((3, 2, 1))),
        (float("nan"), -float("nan")),
        (10**30, int("1" + "0" * 30)),
        (Path("a/b"), PurePosixPath("a/b")),
        (torch.Size((1, 2)), [1, 2]),
        (scale(1), scale(1)),
    ],
)
def test_equal_values_have_equal_bytes(one, other):
    assert encode(one) == encode(other)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, VALUES)
def test_bytes_are_equal_exactly_where_values_are(one, other):
    def shown(value):  # with types, -0.0 and NaN
        if isinstance(value, dict):
            return json.dumps({key: shown(each) for key, each in value.items()}, sort_keys=True)
        if isinstance(value, list):
            return json.dumps([shown(each) for each in value])
        return repr(value).replace("-nan", "nan")

    assert (encode(one) == encode(other)) == (shown(one) == shown(other))


def test_excluded_field_and_property_do_not_count():
    encoding = Encoding(excluded={"Part.port"})
    read = Whole()
    assert (read.area, read.double) == (1, 2)  # the first is kept in the object
    assert encode(read, encoding) == encode(Whole(), encoding)
    assert encode(Whole(port=1), encoding) == encode(Whole(), encoding)
    assert encode(Whole(part=Part(port=1)), encoding) == encode(Whole(), encoding)
    assert encode(Whole(size=2), encoding) != encode(Whole(), encoding)
    assert encode(OtherPart(port=1), encoding) != encode(OtherPart(), encoding)


def test_added_attribute_of_an_object_or_its_class_counts(monkeypatch):
    own = Part()
    own.added = 1
    assert encode(own) != encode(Part())
    before, field = encode(Part()), dataclasses.field(default=1)
    field.name, field._field_type = "later", dataclasses._FIELD
    monkeypatch.setitem(Part.__dataclass_fields__, "later", field)
    monkeypatch.setattr(Part, "later", 1, raising=False)
    assert encode(Part()) != before


def test_record_is_encoded_by_its_attributes():
    encoding = Encoding(records=(Unknown,), excluded={"Unknown.path"})
    one, other = Unknown(), Unknown()
    one.path = "elsewhere"
    assert encode(one, encoding) == encode(other, encoding)
    other.size = 2
    assert encode(one, encoding) != encode(other, encoding)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Unknown(), r"value is of type .*Unknown"),
        ({"a": [0, Unknown()]}, r"value\['a'\]\[1\] is of type .*Unknown"),
        (Whole(part=Part(size=object())), r"value\.part\.size is of type builtins\.object"),
        ({Unknown()}, r"a member of value is of type"),
        ({Unknown(): 1}, r"a key of value is of type"),
        (np.array([Unknown()]), r"value: an array of Python objects"),
        (torch.empty(1, device="meta"), r"value: tensor .* cannot be read"),
        (iter(()), r"value is of type builtins\.tuple_iterator"),
    ],
)
def test_value_without_an_encoding_is_refused_by_path(value, path):
    with pytest.raises(ConfigError, match=path):
        encode(value)


def test_value_that_contains_itself_is_refused():
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(ConfigError, match=r"value\['a'\]\[0\] contains itself"):
        encode(value)
    shared = [1]
    assert encode([shared, shared]) == encode([[1], [1]])


def test_digest_is_equal_in_another_process():
    value = {"a": {1, 2, "b"}, "c": [1.5, "d", True, torch.float16]}
    program = (
        "import torch\nfrom kvtrie.engines.identity.canonical import Encoding\n"
        "print(Encoding().digest({'c': [1.5, 'd', True, torch.float16], 'a': {'b', 2, 1}}, ''))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [PLAIN.digest(value, "value")]
