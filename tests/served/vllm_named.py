"""The name of stored KV: every option counts unless it is listed; equal servers share."""

from __future__ import annotations

import dataclasses
import enum
import os
import pkgutil
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers

import pytest
import servers
import torch
import vllm.config
from servers import BLOCK, prompt
from vllm.engine.arg_utils import EngineArgs

from kvtrie.engines.vllm.excluded import FIELDS
from kvtrie.engines.vllm.start_options import encoding, options_digest

PROMPTS = [prompt(seed, 200) for seed in range(2)]
ALL = 2 * 6 * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


def classes():
    """All configuration classes of vLLM."""
    found = {}
    for each in pkgutil.iter_modules(vllm.config.__path__):
        module = import_module(f"vllm.config.{each.name}")
        for name, kind in vars(module).items():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[kind.__module__, name] = kind
    return [kind for (module, _), kind in sorted(found.items()) if module.startswith("vllm.config")]


OTHERS = (
    (bool, lambda value: not value),
    (enum.Enum, lambda value: next(each for each in type(value) if each is not value)),
    ((int, float), lambda value: value + 1),
    (str, lambda value: value + "x"),
    (torch.dtype, lambda value: torch.float16 if value != torch.float16 else torch.float32),
    ((list, tuple), lambda value: [*value, "x"]),
    ((set, frozenset), lambda value: value | {"x"}),
    (dict, lambda value: {**value, "x": 1}),
    (type(None), lambda _: 7),
)


def other(value):
    """A value that differs from a field's."""
    changes = (change for kind, change in OTHERS if isinstance(value, kind))
    return next(changes, lambda _: None)(value)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_each_field_of_a_configuration_class_changes_the_name_unless_it_is_listed(kind):
    coder, one = encoding(), kind.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(one, field.name, None)
    before = coder.encode(one, "")
    for field in dataclasses.fields(kind):
        for value in (7, True, "x", [1], {"a": 1}):
            object.__setattr__(one, field.name, value)
            assert (coder.encode(one, "") == before) == coder.excludes(kind, field.name)
        object.__setattr__(one, field.name, None)
    if hasattr(one, "__dict__"):
        object.__setattr__(one, "added_by_a_new_version", 1)
        assert coder.encode(one, "") != before


def parts(thing, coder):
    """The configuration objects in one, itself included."""
    yield thing
    for value in coder._fields(thing).values():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from parts(value, coder)


def test_each_field_of_a_server_changes_the_name_unless_it_is_listed(model):
    config, coder = EngineArgs(model).create_engine_config(), encoding()
    before, seen = options_digest(config), set()
    for part in [*parts(config, coder), config.model_config.hf_config]:
        for name, value in list(vars(part).items()):
            if dataclasses.is_dataclass(value) or name.startswith("__"):
                continue
            if isinstance(getattr(type(part), name, None), cached_property):
                continue  # follows from the fields
            if part is config.device_config or value is config.model_config.hf_config:
                continue
            listed = coder.excludes(type(part), name)
            object.__setattr__(part, name, other(value))
            assert (options_digest(config) == before) == listed, (type(part), name)
            object.__setattr__(part, name, value)
            seen.add(name)
    assert options_digest(config) == before
    assert {"max_model_len", "cache_dtype", "max_num_seqs", "rope_parameters"} <= seen


def test_listed_fields_are_those_of_vllm():
    """A field that is gone, or misspelled, is listed for nothing."""
    from transformers import PreTrainedConfig

    known = {kind.__name__: kind for kind in [*classes(), PreTrainedConfig]}
    for field in FIELDS:
        kind, name = field.split(".")
        source = Path(import_module(known[kind].__module__).__file__)
        assert name in source.read_text(), field


def found_by(model, folder, **more):
    extra = {
        "tiers": [
            {"kind": "host", "blocks": 64},
            {"kind": "disk", "blocks": 256, "path": str(folder)},
        ]
    }
    with servers.serve(model, extra, **more) as server:
        server.answers(PROMPTS)
        found = server.found
        server.wait_for_stores()
    return found


def test_servers_with_other_paths_sequences_ports_and_logs_share_and_others_do_not(
    model, tmp_path, monkeypatch
):
    kv = tmp_path / "kv"
    assert found_by(model, kv) == 0
    (tmp_path / "elsewhere").symlink_to(model)
    monkeypatch.setenv("VLLM_PORT", "23456")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert found_by(str(tmp_path / "elsewhere"), kv, max_num_seqs=5, blocks=80) == ALL
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert found_by(model, kv, hf_overrides=rope) == 0
    assert found_by(model, kv, max_model_len=512) == 0


def test_servers_of_two_kernels_do_not_share(model, tmp_path, monkeypatch):
    from vllm import _custom_ops as ops

    assert found_by(model, tmp_path) == 0
    write = ops.cpu_attn_reshape_and_cache

    def flipped(key, value, *given, **more):
        write(key.flip(-1).contiguous(), value, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(ops, "cpu_attn_reshape_and_cache", flipped)
        assert found_by(model, tmp_path) == 0
    assert found_by(model, tmp_path) == ALL


def options_of(worker):
    return options_digest(worker.vllm_config)


def test_all_ranks_form_one_name_of_their_options(model):
    with servers.serve(
        model, {"tiers": [{"kind": "host", "blocks": 8}]}, tensor_parallel_size=2
    ) as (server):
        names = server.core.model_executor.collective_rpc(options_of)
        assert len(names) == 2
        assert all(one == two for one, two in pairwise(names))
