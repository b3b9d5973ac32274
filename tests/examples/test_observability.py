"""`examples/observability` queries exported metrics only; `promtool`, if installed, checks it.

`make test-engines` compares the same queries with the scrape of a running server.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtrie.engines.vllm.metrics import exported

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
BOARD = json.loads((FOLDER / "dashboard.json").read_text())
PROMTOOL = shutil.which("promtool")
EXPORTED = {count.name: count for count in exported()}


def queries():
    texts = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    texts += [each["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
    return [*texts, *(FOLDER / "alerts.yml").read_text().split("- alert")[1:]]


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_what_is_exported(query):
    used = re.findall(r"vllm:kvtrie_\w+", query)
    assert used
    for name in used:
        assert name in EXPORTED
        if f"rate({name}" in query:
            assert EXPORTED[name].type == "counter"
    labels = {label for name in used for label in EXPORTED[name].labels}
    for by in re.findall(r"by \((\w+)\)", query):
        assert by in labels


def test_panels_have_places_of_their_own():
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}
    assert len(places) == len(BOARD["panels"]) == len({panel["id"] for panel in BOARD["panels"]})


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool")
@pytest.mark.parametrize("check", [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_promtool_reads_the_files(check):
    subprocess.run([PROMTOOL, "check", *check], cwd=FOLDER, check=True, capture_output=True)
