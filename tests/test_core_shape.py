"""The shape of the Rust core, read from its source."""

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

CORE = Path(__file__).parents[1] / "rust" / "core" / "src"
LOWEST = ("node", "slots", "bands", "name", "policy_feed", "points")
ORDER = (LOWEST, ("evict",), ("moves",), ("request",), ("hints",), ("observe",))
"""Files and folders of the manager, the lowest first. The facade, manager.rs, has no place."""
COUNTERS = re.compile("count_|end_moves")


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


def test_no_method_of_the_manager_reaches_itself():
    # Room on one tier may take room on the tier below: the only recursion, as deep as the tiers.
    cascade = {"room", "decide", "can_write"}
    cascade |= {"make_room_below", "free_some", "free_victim", "demote_point", "store_point"}
    graph = {
        name: called - cascade if name in cascade else called for name, called in calls().items()
    }
    assert len(graph) > 400
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def level(name):
    """Place of a method's file or folder in ORDER; None for the facade."""
    part = methods()[name][0].with_suffix("").parts[1:2]
    return next((at for at, parts in enumerate(ORDER) if part and part[0] in parts), None)


def test_few_calls_of_the_manager_go_upwards():
    upward = {
        f"{caller} -> {called}"
        for caller, names in calls().items()
        for called in names
        if level(caller) is not None and level(called) is not None
        if level(caller) < level(called) and not COUNTERS.match(called)
    }
    assert len(upward) <= 20, sorted(upward)
    files = {methods()[name][0] for name in methods() if level(name) is None}
    assert {str(file) for file in files} == {"manager.rs"}


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
