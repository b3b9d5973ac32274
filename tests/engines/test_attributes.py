"""No class of an engine has more attributes than a reader can keep in mind."""

import ast
from pathlib import Path

import kvtrie.engines

MOST = 20
FOLDER = Path(kvtrie.engines.__file__).parent


def own_attributes(node):
    """Attributes that a class assigns on itself, and the fields of a dataclass."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return fields | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def all_classes():
    """Attributes and bases of the classes under `engines`, by name."""
    found = {}
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                attributes, more = found.get(node.name, (set(), []))
                found[node.name] = attributes | own_attributes(node), more + bases
    return found


def with_bases(name, classes):
    """Attributes of a class, its bases' included: a chain of classes is one object."""
    attributes, bases = classes.get(name, (set(), []))
    return attributes.union(*(with_bases(base, classes) for base in bases))


def test_no_class_has_more_than_twenty_attributes():
    classes = all_classes()
    counts = {name: len(with_bases(name, classes)) for name in classes}
    assert counts["SchedulerConnector"] > 5
    assert not {name: count for name, count in counts.items() if count > MOST}
