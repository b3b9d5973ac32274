"""Texts of clients, files and servers come to terminals and logs escaped and bounded."""

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.cli import main
from kvtrie.demo.chart import overview, session_map, tier_table
from kvtrie.demo.report import Report, write_report
from kvtrie.engines.server.boundary import Boundary
from kvtrie.printable import printable

# A title of the terminal, a cleared screen, a forged line, and letters in another order.
EVIL = "\x1b]0;mine\x07\x1b[2J\nno prompt has diverged\u202e[red]x[/red]"
SHOWN = r"\x1b]0;mine\x07\x1b[2J\nno prompt has diverged\u202e[red]x[/red]"


@given(st.text())
def test_one_line_without_control_characters_comes_of_any_text(text):
    shown = printable(text, 50)
    assert len(shown.splitlines()) <= 1
    assert all(unicodedata.category(one)[0] != "C" for one in shown)
    assert len(shown) <= 50 * len(r"\U0010ffff") + 40
    printable(text, in_ascii=True).encode("ascii")


def test_letters_stay_and_the_rest_is_escaped():
    assert printable("Gespräch 7 会话") == "Gespräch 7 会话"
    assert printable("Gespräch", in_ascii=True) == r"Gespr\xe4ch"
    assert printable(EVIL) == SHOWN
    assert printable("\ud800") == r"\ud800"
    assert printable("x" * 1000, 4) == "xxxx... (1000 characters)"


def test_a_log_has_one_line_of_a_request_whatever_its_texts(caplog):
    boundary = Boundary("kvtrie", logging.getLogger("vllm.kvtrie"), lambda: 0)
    boundary.ignored(EVIL * 9, f"session {EVIL * 99}")
    with boundary.contained(EVIL):
        raise KeyError(EVIL)
    with boundary.contained(None):
        raise RuntimeError(EVIL)
    texts = [record.getMessage() for record in caplog.records]
    assert all(len(text.partition("\n")[0]) < 1200 for text in texts)
    assert len(texts[0].splitlines()) == 1
    assert SHOWN in texts[2].encode().decode()
    for text, record in zip(texts, caplog.records, strict=True):
        assert record.exc_info is None  # a traceback ends with the text as it is
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert "no prompt has diverged" not in {line.strip() for line in text.splitlines()}
    assert "test_printable.py" in texts[1]  # the calls that led there
    assert "RuntimeError" in texts[2]


@pytest.fixture
def report(tmp_path):
    import numpy as np

    sessions = {EVIL: np.zeros((2, 3), dtype=np.int8)}
    made = Report(EVIL, 16, 2, {EVIL: {"slots": 3}}, sessions, {EVIL: 0})
    write_report(tmp_path / "r.json", made)
    return made, str(tmp_path / "r.json")


def test_a_report_draws_names_escaped(report):
    made, _ = report
    for text in (overview(made), session_map(made, EVIL), tier_table(made)):
        assert SHOWN in text
        assert text.replace("\n", "").isprintable()


def test_errors_of_commands_are_one_line(report, capsys):
    assert main(["map", report[1], "--session", "none"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), SHOWN in err) == (1, True)
