"""The stubs in `typings/`: what the lists name of engines, as pyright reads it.

    .engines/vllm/bin/python tests/served/stubs.py vllm

writes those of an engine from the package installed for this interpreter: names of
parameters, which of them may be left out, and types where they are plain. `--check` needs no
engine: it compares the names in the committed stubs with the lists.
Invariant: a stub has what its list has and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from pathlib import Path

from stub_module import StubModule

from kvtrie.engines.sglang import surface as surface_sglang
from kvtrie.engines.vllm import surface as surface_vllm

TYPINGS = Path(__file__).parents[2] / "typings"
LISTS = {"vllm": surface_vllm, "sglang": surface_sglang}


def written(engine):
    """The stubs of an engine out of the installed package: file, below `typings`, and text."""
    listed = LISTS[engine]
    homes = {name: module for module, name in listed.USED}
    modules = {}
    for module, name in listed.NAMES:
        modules.setdefault(module, StubModule(module, homes)).add_name(name)
    for (module, name), names in listed.USED.items():
        modules.setdefault(module, StubModule(module, homes)).add_class(name, names)
    for name in list(modules):
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            modules.setdefault(package, StubModule(package, homes))
    inside = {name.rpartition(".")[0] for name in modules}
    return {
        name.replace(".", "/") + ("/__init__.pyi" if name in inside else ".pyi"): each.text()
        for name, each in modules.items()
    }


def committed(engine):
    """The stubs of an engine that are there: file, below `typings`, and text."""
    return {
        file.relative_to(TYPINGS).as_posix(): file.read_text()
        for file in sorted((TYPINGS / engine).rglob("*.pyi"))
    }


def names_in(texts):
    """Names in stubs: module and name, or module, class and member."""
    written = set()
    for path, text in texts.items():
        module = path.removesuffix(".pyi").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(text).body:
            written |= {(module, name) for name in _names(node)}
            if isinstance(node, ast.ClassDef):
                written |= {
                    (module, node.name, name) for each in node.body for name in _names(each)
                }
    return written


def names_of(listed):
    """Names in a list, in the same form."""
    names = {*listed.NAMES, *listed.USED}
    return names | {(*each, name) for each, names in listed.USED.items() for name in names}


def differences(listed, texts):
    """Names that only the list or only the stubs have, a line each."""
    listed, found = names_of(listed), names_in(texts)
    return [f"{'.'.join(each)} is not in the stubs" for each in sorted(listed - found)] + [
        f"{'.'.join(each)} is not in the list" for each in sorted(found - listed)
    ]


def _names(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [each.id for each in targets]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", nargs="?", choices=list(LISTS))
    parser.add_argument("--check", action="store_true", help="compare with the lists")
    given = parser.parse_args()
    if given.check or given.engine is None:
        lines = [
            each for name, listed in LISTS.items() for each in differences(listed, committed(name))
        ]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 1 if lines else 0
    if given.engine == "sglang":
        import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load
    texts = written(given.engine)
    shutil.rmtree(TYPINGS / given.engine, ignore_errors=True)
    for path, text in texts.items():
        file = TYPINGS / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
