"""Every option of SGLang is part of the name of stored pages, unless it is listed with a reason."""

from __future__ import annotations

import benches.peers.stand_ins  # noqa: F401 # isort: skip - without it sglang does not load

import copy

import pytest
from hicache import HostPool, opened, served_model
from sglang.srt.server_args import ServerArgs

from kvtrie.engines.sglang import start_options, weights
from kvtrie.engines.sglang.excluded import FIELDS, VARIABLES
from kvtrie.errors import ConfigError

LISTED = {name for names in FIELDS.values() for name in names}
NAMES = ServerArgs.__struct_fields__


class Arguments:
    """The fields of `ServerArgs` with their defaults, which a test may set."""

    def __init__(self, **more):
        given = ServerArgs(model_path="model")
        vars(self).update({name: copy.copy(getattr(given, name)) for name in NAMES} | more)


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "other" if value is None or isinstance(value, str) else [value, "other"]


def test_every_listed_option_is_one_of_sglangs():
    assert not {name for name in LISTED - set(NAMES) if not name.startswith("_")}
    assert len(LISTED) == sum(map(len, FIELDS.values()))
    assert all(reason for reason in (*FIELDS, *VARIABLES))


def test_a_real_record_is_encoded():
    given = ServerArgs(model_path="model")
    assert start_options.options_digest(given) == start_options.options_digest(
        ServerArgs(model_path="elsewhere", port=1234, log_level="debug", max_running_requests=3)
    )
    assert start_options.options_digest(given) != start_options.options_digest(
        ServerArgs(model_path="model", kv_cache_dtype="fp8_e4m3")
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_option_changes_the_name_unless_it_is_listed(name, monkeypatch):
    monkeypatch.setattr(start_options, "versions", dict)
    before = start_options.options_digest(Arguments())
    given = Arguments()
    if name == "trust_mm_content_hashes":
        with pytest.raises(ConfigError, match="clients name the content of their media"):
            start_options.options_digest(Arguments(trust_mm_content_hashes=True))
        return
    setattr(given, name, other(getattr(given, name)))
    assert (start_options.options_digest(given) == before) is (name in LISTED)


def test_an_option_that_a_new_sglang_adds_changes_the_name():
    before = start_options.options_digest(Arguments())
    assert start_options.options_digest(Arguments(rotate_twice=True)) != before
    with pytest.raises(ConfigError, match=r"rotate_by.* no canonical encoding"):
        start_options.options_digest(Arguments(rotate_by=object()))


def test_a_resolved_option_counts_as_it_was_resolved():
    given = Arguments(_resolved_overrides=[("test", {"attention_backend": "triton"})])
    assert start_options.options(given)["attention_backend"] == "triton"
    assert start_options.options_digest(given) != start_options.options_digest(Arguments())


def test_variables_and_versions_change_the_name(monkeypatch):
    names = {start_options.options_digest(Arguments())}
    monkeypatch.setenv("SGLANG_PORT", "1")
    names.add(start_options.options_digest(Arguments()))
    assert len(names) == 1
    monkeypatch.setenv("SGLANG_A_NEW_KERNEL", "1")
    names.add(start_options.options_digest(Arguments()))
    monkeypatch.setattr(start_options, "versions", lambda: {"sgl-kernel": "0"})
    names.add(start_options.options_digest(Arguments()))
    assert len(names) == 3


def test_pages_of_other_options_and_numbers_are_not_found(tmp_path, monkeypatch):
    model = served_model(monkeypatch)
    given = Arguments()
    monkeypatch.setattr(weights, "get_server_args", lambda: given)
    storage = opened(tmp_path)
    assert storage.set("a", HostPool().get_data_page(0))
    storage.close()

    def found():
        storage = opened(tmp_path)
        try:
            return storage.exists("a")
        finally:
            storage.close()

    for name, value, expected in (
        ("attention_backend", "triton", False),
        ("attention_backend", None, True),
        ("model_path", "elsewhere", True),
        ("port", 1234, True),
        ("max_running_requests", 7, True),
        ("log_level", "debug", True),
        ("kv_cache_dtype", "fp8_e5m2", False),
        ("kv_cache_dtype", "auto", True),
    ):
        setattr(given, name, value)
        assert found() is expected, name
    model.attn.scaling = 0.5
    assert not found()
    del model.attn.scaling
    assert found()
