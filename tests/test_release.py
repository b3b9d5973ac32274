"""A release: its version, its section in CHANGELOG, its URLs in one place, and its workflows."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKSPACE = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
PACKAGE = WORKSPACE["package"]
VERSION = PACKAGE["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
HOSTED = r"https?://(?:\w[\w.-]*\.)?(?:github|gitlab|readthedocs)\.\w+/\S*\bkvtrie\b"


def test_every_crate_has_the_version():
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    ours = {each["name"]: each["version"] for each in locked if each["name"].startswith("kvtrie-")}
    assert len(ours) >= 6
    assert set(ours.values()) == {VERSION}
    assert {each["version"] for each in WORKSPACE["dependencies"].values()} == {VERSION}


def test_the_newest_release_of_the_changelog_has_the_version_a_date_and_a_link():
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[\w.]*)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert released[0] == VERSION
    for each in released:
        assert f"\n[{each}]: ../../releases/tag/v{each}\n" in text


@pytest.mark.parametrize("key", ["homepage", "repository"])
def test_urls_of_the_project_are_in_one_place(key):
    """A publisher fills in `Cargo.toml`; wheels, crates and the site take the URLs from there."""
    url = PACKAGE[key]
    assert url.startswith("https://")
    listed = subprocess.check_output(("git", "ls-files"), cwd=ROOT, text=True).split()  # noqa: S607
    ours = re.compile(rf"{re.escape(url)}|{HOSTED}")
    files = [ROOT / name for name in listed if (ROOT / name).is_file()]
    named = [file.name for file in files if ours.search(file.read_text(errors="ignore"))]
    assert named == ["Cargo.toml"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" in project["dynamic"]
    extension = tomllib.loads((ROOT / "rust/python/Cargo.toml").read_text())["package"]
    assert extension[key] == {"workspace": True}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_targets_and_actions_by_their_commits(workflow):
    """`make lint` validates the rest, with check-jsonschema and zizmor."""
    text = workflow.read_text()
    listed = ", ".join(re.findall(r"target: \[(.*)\]", text))  # of a matrix
    for command in re.findall(r"run: (.*)", text):
        called = re.fullmatch(r"make (\S+)", command)[1]
        assert set(listed.split(", ") if called == '"$TARGET"' else [called]) <= TARGETS
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+|\$/\.github/workflows/ci\.yml", action)
