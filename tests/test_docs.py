"""The documentation is true: its Python runs, its commands exist, its links lead somewhere.

Python blocks of one file run in order in one namespace, in an empty folder.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import indent

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie.engines import transformers
from kvtrie.engines.vllm import settings as vllm_settings
from kvtrie.engines.vllm.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
TARGETS = set(re.findall(r"^(?:#: )?([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def load_hooks():
    """The module that mkdocs runs as a plug-in."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()
HELP = {parser.prog: parser.format_help() for parser in HOOKS.parsers()}
GENERATED = {ROOT / "docs" / "reference" / name for name in ("cli.md", "configuration.md")}


@pytest.fixture(scope="module")
def generated():
    """The pages that the build of the documentation writes."""
    return HOOKS.pages()


def imported() -> set[str]:
    """Every name that Python of the documentation imports from kvtrie."""
    trees = [ast.parse(code) for page in PAGES for _, code in blocks(page, "python")]
    return {
        f"{node.module}.{name.name}"
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvtrie")
        for name in node.names
        if node.module != "kvtrie.demo.model"  # models to try things with
    }


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page in these languages: line of the first line of code, and text."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start(2)), found[2])
        for found in FENCE.finditer(text)
        if found[1] in languages
    ]


def commands() -> list[str]:
    """Every shell command of the documentation, once."""
    lines = [
        line
        for page in PAGES
        for _, block in blocks(page, "sh", "bash")
        for line in block.splitlines()
    ]
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines} - {""})


def names_of_sglang(words: list[str]) -> bool:
    """Whether a command of SGLang names what we have."""
    if "--radix-cache-backend" in words:
        return words[words.index("--radix-cache-backend") + 1] == "kvtrie"
    extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    home = (ROOT / "python").joinpath(*extra["module_path"].split(".")).with_suffix(".py")
    return f"class {extra['class_name']}(" in home.read_text()


def settings_of(words: list[str], folder: Path) -> Settings:
    """Settings in a command of vLLM, its paths in a folder of the test."""
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KvtrieConnector"
    extra = config["kv_connector_extra_config"]
    for tier in extra.get("tiers", ()):
        if "path" in tier:
            tier["path"] = str(folder / tier["path"].strip("/"))
    return Settings.read(extra)


def readme_names():
    """Objects that README.md takes as given: a model and ids."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    return {"model": model, "ids": torch.arange(1, 41)[None]}


def help_of(program, words):
    """What `--help` prints for the command that these words begin with."""
    if program == "kvtrie":
        fits = [
            prog
            for prog in HELP
            if all(
                word == given or word.isupper()  # an argument before a subcommand
                for word, given in itertools.zip_longest(
                    prog.split(), [program, *words], fillvalue=""
                )
                if word
            )
        ]
        return HELP[max(fits, key=len)]
    script = Path(sys.executable).with_name(program)
    asked = [script, words[0], "--help"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def named(pages: list[Path]) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python")]))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", **(readme_names() if page.name == "README.md" else {})}
    for line, code in blocks(page, "python"):
        padded = "\n" * line + code  # so that a traceback names the page's own line
        exec(compile(padded, str(page), "exec"), names)  # noqa: S102


def test_the_shared_cache_of_the_readme_is_found_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(transformers.OpenModel.cache.__kwdefaults__, "lookup_s", 30.0)
    (code,) = [code for _, code in blocks(ROOT / "README.md", "python") if "remote=" in code]
    assert len(code.splitlines()) == 3
    names, read = readme_names() | {"open_kv": transformers.open}, []
    for _ in range(2):
        exec(compile(code, "README.md", "exec"), names)  # noqa: S102
        read.append(names["kv"].executor.pools[2].stats().results.get(("get", "ok"), 0))
    assert read == [0, 2]


def check_module(words):
    """A module that is run: an example, or SGLang's server."""
    assert words[0] == "-m"
    if words[1].startswith("examples."):
        assert (ROOT / words[1].replace(".", "/") / "__main__.py").exists()
    else:
        assert words[1] == "sglang.launch_server"
        assert names_of_sglang(words)


def check_crate(words):
    """A crate of the workspace that is added, or an example of one that is run."""
    crate = next(word for word in words if word.startswith("kvtrie-"))
    folder = ROOT / "rust" / crate.removeprefix("kvtrie-")
    assert words[0] in {"add", "run"}
    assert f'name = "{crate}"' in (folder / "Cargo.toml").read_text()
    if "--example" in words:
        assert (folder / "examples" / f"{words[-1]}.rs").exists()


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command, tmp_path):
    program, *words = shlex.split(command)
    if program == "make":
        assert {word for word in words if "=" not in word} <= TARGETS
    elif program == "pip":
        assert words[0] == "install"
        package, _, extras = words[-1].rstrip("]").partition("[")
        assert package == "kvtrie"
        assert set(extras.split(",")) - {""} <= set(EXTRAS)
    elif program in {"kvtrie", "maturin"}:
        text = help_of(program, words)
        for word in itertools.takewhile(lambda word: word != "--", words[1:]):
            if word.startswith("--"):
                assert word.partition("=")[0] in text
    elif "--kv-events-config" in words:
        assert [program, words[0]] in (["vllm", "serve"], ["sglang", "serve"])
        events = json.loads(words[words.index("--kv-events-config") + 1])
        assert events["publisher"] == "zmq"
        assert {events["endpoint"], events["replay_endpoint"]} == {"tcp://*:5557", "tcp://*:5558"}
    elif program == "vllm":
        assert words[0] == "serve"
        assert settings_of(words, tmp_path).tiers
    elif program == "curl":
        assert words[0].removeprefix("http://localhost:8000") in {"/metrics", "/v1/completions"}
        assert all(json.loads(word) for word in words if word.startswith("{"))
    else:
        {"python": check_module, "cargo": check_crate}[program](words)


def test_rust_of_a_page_is_that_of_the_example_it_explains():
    source = (ROOT / "rust/core/examples/engine.rs").read_text()
    assert len(source.splitlines()) <= 300
    parts = [code for _, code in blocks(ROOT / "docs/rust.md", "rust")]
    assert len(parts) >= 6
    depths = [" " * depth for depth in (4, 8, 12)]
    missing = [part for part in parts if all(indent(part, by) not in source for by in depths)]
    assert missing == []


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_to_files(page):
    local = [to for to in LINK.findall(page.read_text()) if "://" not in to]
    paths = [(page.parent / to).resolve() for to in local]
    assert not [path for path in paths if not path.exists() and path not in GENERATED]


def test_every_public_module_has_a_reference_page():
    on_pages = HOOKS.modules()
    assert len(on_pages) == len(set(on_pages))
    without = {
        package
        for package in HOOKS.PACKAGES
        if not any(f"{name}.".startswith(f"{package}.") for name in on_pages)
    }
    assert not without


def test_a_public_name_without_a_page_is_missing():
    names = {
        f"{module}.{name}"
        for module in {*HOOKS.PACKAGES, *filter(HOOKS.is_module, HOOKS.modules())}
        for name in HOOKS.public_names(module)
    }
    assert not HOOKS.missing(names)
    assert HOOKS.missing(names - {"kvtrie.BlockManager"}) == ["kvtrie.BlockManager"]
    assert HOOKS.missing(names - {"kvtrie.fuse.Fusor"}) == ["kvtrie.fuse.Fusor"]


def test_names_that_pages_import_are_in_the_reference():
    on_pages = HOOKS.modules()
    strange = [name for name in sorted(imported()) if name.rpartition(".")[0] not in on_pages]
    assert not strange


def test_llms_txt_has_the_first_sentence_of_a_page():
    assert (
        HOOKS.first_sentence("# Head\n\nA [link](a.md), and **more**. Next.") == "A link, and more."
    )
    assert (
        HOOKS.first_sentence("# Head\n\n| a |\n|---|\n\n```sh\nx\n```\n\nText: more")
        == "Text: more"
    )
    assert HOOKS.first_sentence("# Head\n\n::: kvtrie.errors\n    options: x").endswith(".")
    assert HOOKS.first_sentence("# Head") == ""


def test_the_configuration_page_has_every_key(generated):
    rows = set(re.findall(r"^\| `(\w+)` \|", generated["reference/configuration.md"], re.MULTILINE))
    assert {*vllm_settings.KEYS, *vllm_settings.TIER_KEYS} <= rows
    assert {"policy", "objective", "path", "bytes", "blocks", "durability", "threads"} <= rows


def test_the_command_page_has_every_command(generated):
    heads = re.findall(r"^##+ (kvtrie .*)$", generated["reference/cli.md"], re.MULTILINE)
    assert heads == [parser.prog for parser in HOOKS.parsers()]
    assert {"kvtrie demo", "kvtrie finetune_long_lora", "kvtrie sim size", "kvtrie disk gc"} <= set(
        heads
    )
    assert "| `--structure holes|leaf-only` | `holes` |" in generated["reference/cli.md"]
    assert "| `--kv_cache.cache_length N` | `16384` |" in generated["reference/cli.md"]


def section(page: str, head: str) -> str:
    """The text of a page from a head of the second level up to the next one."""
    return (ROOT / page).read_text().partition(f"\n## {head}\n")[2].partition("\n## ")[0]


def test_files_to_read_about_a_wrong_eviction_exist():
    rows = re.findall(
        r"^\| (`.*?) \|",
        section("CONTRIBUTING.md", "A wrong eviction: where to look"),
        re.MULTILINE,
    )
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert 1 < len(files) <= 8
    assert [name for name in files if not (ROOT / "rust/core/src" / name).is_file()] == []


def test_names_of_the_glossary_are_in_the_code():
    rows = [row.split("|")[1:3] for row in section("docs/index.md", "Words").splitlines()[4:]]
    names = {name for row in rows for cell in row for name in re.findall(r"`([^`]+)`", cell)}
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("rust/*/src/**/*.rs")]
    text = "\n".join(file.read_text() for file in sources)
    assert names > {"block_tokens", "layer_slots"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
