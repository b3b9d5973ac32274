"""Inputs of parsers: valid documents and texts in which a few values or characters are changed."""

from __future__ import annotations

import copy
import json

from hypothesis import strategies as st

__all__ = ["EXTREMES", "changed", "edited", "lines_of", "toml"]

EXTREMES = (
    *(0, -1, 1, 2, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**400, 0.0, -0.0, 0.5, 1e-320, 1e18, 1e308, -1e308, float("inf"), float("nan")),
    *(True, False, None, "", " ", "x", "0", "-1", "1e400", "9" * 5000, "\0", "\ud800", "é" * 40000),
    *("%", "#", "?", "../..", "/dev/null", "/proc/self/mem", "a\nb", "\u0663", "\U0001f600"),
    *([], [[]], {}, {"": None}, [0], [None], ["x"], [2**64], [[0, 1]], [-1], [1.5], {"x": 1}),
)
"""Values at the ends of what numbers, texts, lists and tables can be."""

_ANY = st.sampled_from(EXTREMES)


def _places(value, found=()):
    """The paths of all values of a document."""
    yield found
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, one in items:
        yield from _places(one, (*found, key))


def changed(*documents, most=3):
    """Documents with up to `most` values replaced by extremes, removed, or added under a key."""

    @st.composite
    def draw_one(draw):
        document = copy.deepcopy(draw(st.sampled_from(documents)))
        for _ in range(draw(st.integers(0, most))):
            place = draw(st.sampled_from(list(_places(document))))
            if not place:
                if draw(st.integers(0, 9)) == 0:
                    document = copy.deepcopy(draw(_ANY))
                elif isinstance(document, dict):
                    document[draw(st.sampled_from(("x", "", "machines", "tokens")))] = (
                        copy.deepcopy(draw(_ANY))
                    )
                continue
            above = document
            for key in place[:-1]:
                above = above[key]
            if draw(st.integers(0, 4)) == 0:
                del above[place[-1]]
            else:
                above[place[-1]] = copy.deepcopy(draw(_ANY))
        return document

    return draw_one()


def edited(*texts, most=3):
    """Texts with up to `most` pieces replaced by other characters."""
    pieces = st.one_of(
        st.text(max_size=8),
        st.sampled_from([*(one for one in EXTREMES if isinstance(one, str)), '"', "[" * 2000, ","]),
    )

    @st.composite
    def draw_one(draw):
        text = draw(st.sampled_from(texts))
        for _ in range(draw(st.integers(0, most))):
            at = draw(st.integers(0, len(text)))
            end = min(len(text), at + draw(st.integers(0, 6)))
            text = text[:at] + draw(pieces) + text[end:]
        return text

    return draw_one()


def lines_of(*rows, most=3):
    """Files of JSON lines whose rows are changed, some of them with characters changed too."""
    line = changed(*rows, most=most).map(json.dumps)
    line = st.one_of(line, line.flatmap(lambda text: edited(text, most=1)))
    return st.lists(line, min_size=0, max_size=4).map("\n".join)


def toml(document):
    """Return a document as TOML, whether there is such TOML or not."""

    def value(one):
        if isinstance(one, dict):
            pairs = (f"{json.dumps(key)} = {value(each)}" for key, each in one.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(one, list):
            return f"[{', '.join(map(value, one))}]"
        return {"Infinity": "inf", "NaN": "nan"}.get(text := json.dumps(one), text)

    if not isinstance(document, dict):
        return value(document)
    return "".join(f"{json.dumps(key)} = {value(one)}\n" for key, one in document.items())
