"""The names of vLLM's classes out of its sources, which need not be installed nor imported."""

from __future__ import annotations

import ast
import subprocess
import zipfile


class Sources:
    """The modules of a wheel.

    Args:
        wheel: the wheel's file.
    """

    def __init__(self, wheel):
        self._zip = zipfile.ZipFile(wheel)
        self._files = set(self._zip.namelist())
        self._trees = {}

    def tree(self, module):
        """A module, parsed; None if it is not there."""
        if module not in self._trees:
            path = module.replace(".", "/")
            named = [each for each in (f"{path}.py", f"{path}/__init__.py") if each in self._files]
            self._trees[module] = ast.parse(self._zip.read(named[0])) if named else None
        return self._trees[module]

    def find(self, module, name, seen=()):
        """A class and the module that defines it, through imports; None if it is not there."""
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        home = self._absolute(module, node)
                        return self.find(home, alias.name, (*seen, (module, name)))
        return None

    def _absolute(self, module, node):
        if not node.level:
            return node.module
        package = module.split(".")
        inside = f"{'/'.join(package)}/__init__.py" in self._files
        package = package[: len(package) - node.level + inside]
        return ".".join([*package, *filter(None, [node.module])])

    def members(self, module, name):
        """Methods, fields and what methods set on `self`, of a class and its bases; or None."""
        found = self.find(module, name)
        if found is None:
            return None
        home, node = found
        names = {"__init__"}  # a dataclass has it without saying so
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(each.name)
            elif isinstance(each, ast.AnnAssign | ast.Assign):
                targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
                for target in targets:
                    names |= _named(target)
        for base in node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                names |= self.members(home, named.id) or set()
        return names


def _named(target):
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        return {target.attr} if target.value.id == "self" else set()
    if isinstance(target, ast.Tuple):
        return set().union(*(_named(each) for each in target.elts))
    if isinstance(target, ast.Constant) or not hasattr(target, "elts"):
        return set()
    return set()


def next_wheel(folder, python):
    """The wheel of vLLM's next version, fetched once by an interpreter that has pip."""
    if not (there := sorted(folder.glob("vllm-0.33*.whl"))):
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:", "--dest", str(folder), "vllm>=0.33,<0.34"]
        subprocess.run(command, check=True)
        there = sorted(folder.glob("vllm-0.33*.whl"))
    return there[-1]
