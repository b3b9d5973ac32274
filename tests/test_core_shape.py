"""The shape of the Rust core, read from its source."""

import re
import sys
from functools import cache
from pathlib import Path

CORE = Path(__file__).parents[1] / "rust" / "core" / "src"
LOWEST = ("node", "slots", "bands", "name", "policy_feed", "points", "meter", "producers")
RANKS = (LOWEST, ("evict",), ("moves",), ("request",), ("hints",), ("observe",))
"""Files and folders of the manager, the lowest first. The facade, manager.rs, has none."""


@cache
def methods():
    """File and body of each method in `impl Manager`, by name."""
    found = {}
    for path in [CORE / "manager.rs", *sorted((CORE / "manager").rglob("*.rs"))]:
        text = re.sub(r"//[^\n]*|(?s:#\[cfg\(test\)\]\s*mod .*)", "", path.read_text())
        for block in re.findall(r"(?ms)^impl Manager \{$(.*?)^\}$", text):
            parts = re.split(r"(?m)^    (?:pub(?:\([^)]*\))? )?(?:const )?fn (\w+)", block)
            for name, body in zip(parts[1::2], parts[2::2], strict=True):
                assert name not in found, name
                found[name] = (path.relative_to(CORE), re.sub(r"\s*\n\s*\.", ".", body))
    return found


@cache
def calls():
    """The methods that each method calls on `self` or `manager`, or names as `Self::name`."""
    pattern = re.compile(r"\b(?:self|manager)\.(\w+)\(|\bSelf::(\w+)\b")
    return {
        name: {a or b for a, b in pattern.findall(body)} & methods().keys()
        for name, (_, body) in methods().items()
    }


def reached(name):
    """The methods that a method calls, and those that they call."""
    found, left = set(), [name]
    while left:
        more = calls()[left.pop()] - found
        found |= more
        left += more
    return found


def rank(name):
    """Place of a method's file or folder in RANKS; None for the facade."""
    part = methods()[name][0].with_suffix("").parts[1:2]
    return next((at for at, parts in enumerate(RANKS) if part and part[0] in parts), None)


def test_one_cascade_is_the_only_recursion():
    # Room on one tier takes room on the tier below, as deep as the tiers.
    recursive = {name for name in calls() if name in reached(name)}
    sys.stdout.write(f"{len(recursive)} of {len(calls())} methods recurse: {sorted(recursive)}\n")
    assert len(calls()) > 300
    assert {"room", "decide"} <= recursive
    assert len(recursive) <= 4


def test_few_calls_of_the_manager_go_upwards():
    unranked = {str(methods()[name][0]) for name in calls() if rank(name) is None}
    assert unranked == {"manager.rs"}
    upward = {
        f"{caller} -> {called}"
        for caller, names in calls().items()
        for called in names
        if None not in (rank(caller), rank(called)) and rank(caller) < rank(called)
    }
    sys.stdout.write(f"{len(upward)} calls go upwards: {sorted(upward)}\n")
    assert len(upward) <= 20


def test_a_policy_is_a_short_trait():
    text = (CORE / "policy.rs").read_text()
    trait = re.search(r"(?ms)^pub trait Policy\b.*?^}", text)
    names = re.findall(r"(?m)^    fn (\w+)", trait.group())
    assert {"terms", "compare"} <= set(names)
    assert len(names) <= 14


def test_functions_of_the_core_fit_a_screen():
    heads = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?fn (\w+)")
    long = []
    for path in sorted(CORE.rglob("*.rs")):
        lines = path.read_text().partition("#[cfg(test)]\nmod ")[0].splitlines()
        for at, line in enumerate(lines):
            if path.name == "tests.rs" or not (head := heads.match(line)):
                continue
            size = next((n for n, end in enumerate(lines[at:], 1) if end == head[1] + "}"), 1)
            if size > 60:
                long.append(f"{path.relative_to(CORE)}: {head[2]} has {size} lines")
    assert not long, long
