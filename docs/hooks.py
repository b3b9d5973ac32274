"""Generated pages of `mkdocs build`, and a check for public names without a page.

`reference/cli.md` comes from the parsers, `reference/configuration.md` from the dataclasses and
docstrings of the engines' settings, `llms.txt` from the navigation. mkdocstrings writes the API
reference. If it misses a name in `__all__` of a documented module, the build fails. Nothing
generated is in the repository: a committed copy would need a test to compare it, and a table of
settings in a page would repeat the docstrings in different words. Modules are parsed, not
imported, so vLLM and SGLang need not be installed. The parsers of commands are called.
Cost: an import of `kvtrie.train`, for the parsers with dotted keys.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import tomllib
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocstrings import Inventory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation, Section
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "python"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
PACKAGES = (
    "kvtrie",
    "kvtrie.cluster",
    "kvtrie.transfer",
    "kvtrie.tiers",
    "kvtrie.tiers.remote",
    "kvtrie.engines.transformers",
    "kvtrie.engines.sessions",
    "kvtrie.engines.server.tenant",
    "kvtrie.engines.vllm",
    "kvtrie.engines.sglang",
    "kvtrie.fuse",
    "kvtrie.selective",
    "kvtrie.train",
    "kvtrie.sim",
    "kvtrie.kernels",
    "kvtrie.metrics",
)
"""Packages and modules of the public API."""

_SETTINGS = "kvtrie.engines.vllm.settings"
_DISK = "kvtrie.engines.vllm.disk_tier"
_OFFLOADING = "kvtrie.engines.vllm.offloading"
_RADIX = "kvtrie.engines.sglang.radix"
_RADIX_START = "kvtrie.engines.sglang.radix_start"
_PAGES = "kvtrie.engines.sglang.pages"
_CLI = """# Command line

`pip install 'kvtrie[cli]'` adds tables and pictures. `kvtrie COMMAND --help` prints the arguments
of a command. Exit status: 0 on success, 1 if a check of the command failed, 2 for a wrong
argument, setting or file, 130 after Ctrl-C.
"""
_CONFIGURATION = """# Configuration

Settings of the plug-ins for vLLM and SGLang. An unknown key, and a value that is not allowed, stop
the server's start with a `ConfigError`.

## vLLM: `kv_connector_extra_config`

Settings of `KvtrieConnector`. [Add kvtrie to a vLLM server](../vllm.md) has a
command.

{settings}
## vLLM: a tier

An object in `tiers`, with some fields of [`Tier`](kvtrie.md#kvtrie.Tier). `kind` is "host",
"disk" or "remote". `write` is "through" by default in a tier above another tier. `blocks` is 10
million by default in a remote tier.
Sizes are sizes of the server, and its ranks divide them.

{tier}
## vLLM: `disk` of `KvtrieOffloadingSpec`

The disk below the host memory of vLLM's own `OffloadingConnector`.

{disk}
## SGLang: `--radix-eviction-policy-config`

With `--radix-cache-backend kvtrie`.

{radix}
## SGLang: `--hicache-storage-backend-extra-config`

With `--hicache-storage-backend dynamic`, next to SGLang's own keys `backend_name`, `module_path`,
`class_name` and `interface_v1`. The keys have the meaning of a `Tier`'s fields: of a disk, with
`keep` of host memory, or with a URL as `path` of a remote tier.

{storage}"""


def on_config(config: MkDocsConfig) -> None:
    """List the decisions in the navigation, in order, and name the site and the repository."""
    package = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    config.site_url, config.repo_url = package["homepage"].rstrip("/") + "/", package["repository"]
    config.repo_name = "source"
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for item in config.nav or ():
        if "Decisions" in item:
            item["Decisions"] = [f"decisions/{file.name}" for file in files]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_nav(nav: Navigation, **_: Any) -> None:
    """Keep the navigation for `llms.txt`."""
    _NAVIGATION.append(nav)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """Keep the first sentence of a page for `llms.txt`."""
    _ABOUT[page.file.src_uri] = first_sentence(markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, and fail on a public name without a page."""
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms(config, _NAVIGATION[-1]))
    with (site / "objects.inv").open("rb") as file:
        absent = missing(Inventory.parse_sphinx(file))
    if absent:
        raise PluginError(
            f"{len(absent)} public names have no page below docs/reference: {', '.join(absent)}"
        )


_NAVIGATION: list[Navigation] = []
_ABOUT: dict[str, str] = {}


def pages() -> dict[str, str]:
    """Return the generated pages by their paths below `docs`."""
    return {"reference/cli.md": cli(), "reference/configuration.md": configuration()}


# ------------------------------------------------------------------------------ public names


def modules() -> list[str]:
    """Return the modules and objects named by pages below `docs/reference`, in order."""
    files = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for file in files for name in DIRECTIVE.findall(file.read_text())]


def public_names(module: str) -> list[str]:
    """Return the names in `__all__` of a module or package, without importing it."""
    for node in ast.parse(_source(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _source(module: str) -> Path:
    path = PYTHON.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def missing(documented: Iterable[str]) -> list[str]:
    """Return the undocumented public names.

    A lazily imported name of a package is documented under its defining module.
    """
    known = set(documented)
    below = {(name.rpartition(".")[2], name) for name in known}
    by_last: dict[str, list[str]] = {}
    for last, name in below:
        by_last.setdefault(last, []).append(name)
    return [
        f"{module}.{name}"
        for module in sorted({*PACKAGES, *(each for each in modules() if is_module(each))})
        for name in public_names(module)
        if not any(each.startswith(f"{module}.") for each in by_last.get(name, ()))
    ]


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module or package, and not an object in a module."""
    path = PYTHON.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


# ------------------------------------------------------------------------------ command line


def cli() -> str:
    """Return the page of all commands and their arguments."""
    parts = [_CLI]
    seen: dict[str, list[tuple[str, str, str]]] = {}
    for parser in parsers():
        depth = "#" * min(len(parser.prog.split()), 3)
        parts.append(f"{depth} {parser.prog}\n\n{_sentence(parser.description)}\n")
        rows = [row for action in _arguments(parser) if (row := _row(action))]
        like = next(
            (prog for prog, those in seen.items() if len(rows) > 1 and set(rows) <= set(those)), ""
        )
        if like:
            less = [_short(row) for row in seen[like] if row not in rows]
            without = f" without {', '.join(dict.fromkeys(less))}" if less else ""
            parts.append(f"Arguments: those of `{like}`{without}.\n")
        elif rows:
            seen[parser.prog] = rows
            parts.append(_table(("Argument", "Default", "Meaning"), rows))
            if parser.epilog:
                parts.append(_sentence(parser.epilog) + "\n")
    return "\n".join(parts)


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield every command's parser, in the order of `kvtrie --help`."""
    from kvtrie import cli as commands
    from kvtrie.cli import finetune, generate, longcontext

    dotted = {
        "generate": generate._parser,
        **{name: partial(finetune._parser, name) for name in finetune.COMMANDS},
        "longcontext_eval": partial(longcontext._parser, None),
    }
    for parser in _below(commands._parser()):
        make = dotted.get(parser.prog.removeprefix("kvtrie "))
        yield parser if make is None else make()


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command, including arguments only explained by its groups."""
    shown = [each for group in parser._action_groups for each in group._group_actions]
    return [*parser._actions, *(each for each in shown if each not in parser._actions)]


def _below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from _below(each)


def _row(action: argparse.Action) -> tuple[str, str, str] | None:
    names = [each for each in action.option_strings if not each.endswith("+")]
    field = action.dest.rpartition(".")[2]
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    # Arguments that jsonargparse adds by itself.
    added = action.help == "Path to a configuration file." or {field, *names} & {
        "help",
        "--print_config",
    }
    if hidden or added or action.help == argparse.SUPPRESS:
        return None
    spelt = "`, `".join([*names[:-1], " ".join([*names[-1:], *_values(action)])])
    text = argparse.HelpFormatter("kvtrie")._expand_help(action) if action.help else ""
    text = re.sub(r" \(default: [^()]*\)$", "", text)
    return f"`{spelt}`", _shown(None if action.nargs == 0 else action.default), text


def _short(row: tuple[str, str, str]) -> str:
    """Return the name of an option, or of its group."""
    name = row[0].strip("`").partition(" ")[0]
    group, dot, _ = name.partition(".")
    return f"`{group}.*`" if dot else f"`{name}`"


def _values(action: argparse.Action) -> list[str]:
    """Return the placeholders for the values of an option."""
    if action.nargs == 0:
        return []
    if action.metavar:
        return [action.metavar] if isinstance(action.metavar, str) else list(action.metavar)
    if action.choices:
        return ["|".join(map(str, action.choices))]
    kind = str(getattr(action, "_typehint", action.type))
    return ["N" if "int" in kind else "X" if "float" in kind else "TEXT"]


# ------------------------------------------------------------------------------ configuration


def configuration() -> str:
    """Return the page of the settings of engines."""
    from kvtrie.engines.server.tenant import SharingSettings
    from kvtrie.engines.sglang.pages import PageSettings
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.tier import Tier

    tier = _fields(Tier, "kvtrie.settings.tier")
    settings = _fields(Settings, _SETTINGS)
    settings |= _fields(SharingSettings, "kvtrie.engines.server.tenant")
    tier["format"] = settings["format"]
    keys = _constant(_SETTINGS, "KEYS")
    tier_keys = _constant(_SETTINGS, "TIER_KEYS")
    head = ("Key", "Default", "Meaning")
    disk = _chosen(_parameters(_DISK, "KvtrieDiskTier"), _constant(_OFFLOADING, "_DISK_KEYS"))
    radix = _chosen(_parameters(_RADIX, "KvtrieRadixCache"), _constant(_RADIX_START, "_KEYS"))
    pages = _chosen(tier, _constant(_PAGES, "_TIER_KEYS"))
    pages += _chosen(_fields(PageSettings, _PAGES), _constant(_PAGES, "_KEYS"))
    return _CONFIGURATION.format(
        settings=_table(head, _chosen(settings, keys)),
        tier=_table(head, _chosen(tier, tier_keys)),
        disk=_table(head, disk),
        radix=_table(head, radix),
        storage=_table(head, pages),
    )


def _fields(kind: type, module: str) -> dict[str, tuple[str, str]]:
    """Return the default and meaning of each field of a dataclass."""
    meanings = _meanings(_loaded(module)[kind.__name__], griffe.DocstringSectionKind.attributes)
    defaults = {
        field.name: "" if field.default is dataclasses.MISSING else _shown(field.default)
        for field in dataclasses.fields(kind)
    }
    return {name: (default, meanings[name]) for name, default in defaults.items()}


def _parameters(module: str, name: str) -> dict[str, tuple[str, str]]:
    """Return the default and meaning of each argument of a class, without importing it."""
    kind = _loaded(module)[name]
    meanings = _meanings(kind, griffe.DocstringSectionKind.parameters)
    return {
        each.name: (_default(each.default), meanings[each.name])
        for each in kind["__init__"].parameters
        if each.name in meanings
    }


def _default(default: Any) -> str:
    from kvtrie.settings.tier import DEFAULT_POLICY

    if default is None:
        return ""
    named = {"DEFAULT_POLICY": DEFAULT_POLICY}
    return _shown(named.get(str(default)) or ast.literal_eval(str(default)))


def _shown(default: object) -> str:
    if default in (None, argparse.SUPPRESS, [], {}) or isinstance(default, argparse.Namespace):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _chosen(known: dict[str, tuple[str, str]], keys: Iterable[str]) -> list[tuple[str, str, str]]:
    return [(f"`{key}`", known[key][0], _sentence(known[key][1])) for key in keys]


def _meanings(kind: Any, section: griffe.DocstringSectionKind) -> dict[str, str]:
    found = [each for each in kind.docstring.parse("google") if each.kind is section]
    return {row.name: " ".join(row.description.split()) for row in found[0].value}


def _constant(module: str, name: str) -> tuple[str, ...]:
    return ast.literal_eval(str(_loaded(module)[name].value))


@cache
def _loaded(module: str) -> Any:
    """Return a module parsed by griffe, without importing it or its package."""
    path = PYTHON.joinpath(*module.split(".")).with_suffix(".py")
    return griffe.visit(module, filepath=path, code=path.read_text())


# ------------------------------------------------------------------------------ llms.txt


def llms(config: MkDocsConfig, nav: Navigation) -> str:
    """Return the index of the site for language models: llmstxt.org."""
    parts = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    top = [item for item in nav.items if item.is_page]
    parts.append("## Pages\n\n" + "\n".join(map(_link, top)) + "\n")
    parts += [
        f"## {section.title}\n\n" + "\n".join(map(_link, _pages(section))) + "\n"
        for section in nav.items
        if section.is_section
    ]
    return "\n".join(parts)


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's first paragraph, without marks, or "".

    A page of the API reference begins with a `:::` line, and takes the module's first sentence.
    """
    parts = [each for each in markdown.split("\n\n") if not each.startswith(("#", "```", "|"))]
    first = (parts or [""])[0]
    if found := DIRECTIVE.match(first.partition("\n")[0]):
        first = ast.get_docstring(ast.parse(_source(found[1]).read_text())) or ""
        first = first.partition("\n\n")[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.?])\s", plain.replace("**", "").removeprefix("Decision.").strip())[0]


def _pages(section: Section) -> Iterator[Page]:
    for item in section.children:
        if item.is_page:
            yield item
        elif item.is_section:
            yield from _pages(item)


def _link(page: Page) -> str:
    about = _ABOUT.get(page.file.src_uri, "")
    return f"- [{page.title}]({page.url or './'}){about and ': ' + about}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in lines) + "\n"


def _cell(text: str) -> str:
    """Return the text of a cell.

    A bar in backticks does not end the cell, and a backslash there would be shown.
    """
    parts = " ".join(text.split()).split("`")
    return "`".join(part if at % 2 else part.replace("|", "\\|") for at, part in enumerate(parts))


def _sentence(text: str | None) -> str:
    said = " ".join((text or "").split())
    return said[:1].upper() + said[1:] + ("" if said.endswith(".") else ".")
