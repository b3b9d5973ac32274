"""The options of an engine that name its KV, and the list of those that do not."""

import dataclasses
import enum
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.vllm import start_options
from kvtrie.engines.vllm.excluded import FIELDS, REASONS, VARIABLES
from kvtrie.engines.vllm.start_options import environment, options_digest
from kvtrie.errors import ConfigError


class Mode(enum.Enum):
    EAGER = 0
    COMPILED = 1


@dataclasses.dataclass
class CacheConfig:
    block_size: int = 32
    cache_dtype: str = "auto"
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float = 0.9


@dataclasses.dataclass
class ParallelConfig:
    tensor_parallel_size: int = 2
    rank: int = 0
    master_port: int = 29500


@dataclasses.dataclass
class ModelConfig:
    model: str = "/models/tiny"
    revision: str | None = None
    max_model_len: int = 4096
    seed: int = 0
    hf_config: PreTrainedConfig = dataclasses.field(default_factory=LlamaConfig)
    hf_overrides: object = dataclasses.field(default_factory=dict)
    multimodal_config: object = None


@dataclasses.dataclass
class CompilationConfig:
    mode: Mode = Mode.EAGER
    cache_dir: str = ""
    static_forward_context: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class SchedulerConfig:
    max_num_seqs: int = 8


@dataclasses.dataclass
class LoggingConfig:
    log_level: str = "INFO"


@dataclasses.dataclass
class VllmConfig:
    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache_config: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    logging_config: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    device_config: object = dataclasses.field(
        default_factory=lambda: SimpleNamespace(device_type="cpu")
    )
    instance_id: str = "1"


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """vLLM's version and environment variables, without vLLM."""
    coder = Encoding(excluded=FIELDS, records=(PreTrainedConfig, SimpleNamespace))
    monkeypatch.setattr(start_options, "encoding", lambda: coder)
    package, envs = ModuleType("vllm"), ModuleType("vllm.envs")
    package.__version__ = "0.32.0"
    envs.environment_variables = dict.fromkeys(["VLLM_MLA_DISABLE", "VLLM_PORT", "LOCAL_RANK"])
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    for name in ("VLLM_MLA_DISABLE", "VLLM_PORT"):
        monkeypatch.delenv(name, raising=False)
    return package


def changed(part, **more):
    config = VllmConfig()
    for name, value in more.items():
        setattr(getattr(config, part) if part else config, name, value)
    return options_digest(config)


SAME = [
    ("", {"instance_id": "2"}),
    ("model_config", {"model": "/elsewhere", "seed": 7}),
    ("cache_config", {"num_gpu_blocks": 100, "gpu_memory_utilization": 0.5}),
    ("parallel_config", {"rank": 1, "master_port": 4000}),
    ("scheduler_config", {"max_num_seqs": 3}),
    ("logging_config", {"log_level": "DEBUG"}),
    ("compilation_config", {"cache_dir": "elsewhere", "static_forward_context": {"a": object()}}),
    ("model_config", {"hf_config": LlamaConfig(name_or_path="/elsewhere")}),
]
OTHER = [
    ("model_config", {"max_model_len": 8192}),
    ("model_config", {"hf_config": LlamaConfig(rms_norm_eps=1e-5)}),
    ("model_config", {"hf_config": LlamaConfig(rope_parameters={"rope_theta": 5e5})}),
    ("model_config", {"hf_overrides": {"rope_theta": 5e5}}),
    ("model_config", {"hf_overrides": lambda config: config}),
    ("cache_config", {"cache_dtype": "fp8"}),
    ("cache_config", {"block_size": 16}),
    ("parallel_config", {"tensor_parallel_size": 1}),
    ("compilation_config", {"mode": Mode.COMPILED}),
    ("scheduler_config", {"added_by_a_new_version": 1}),
    ("", {"added_by_a_new_version": None}),
]


@pytest.mark.parametrize(("part", "more"), SAME)
def test_excluded_option_does_not_change_the_name(part, more):
    assert changed(part, **more) == changed("")


@pytest.mark.parametrize(("part", "more"), OTHER)
def test_any_other_option_changes_the_name(part, more):
    assert changed(part, **more) != changed("")


def test_field_that_a_new_version_adds_changes_the_name(monkeypatch):
    before = changed("")
    field = dataclasses.field(default=1)
    field.name, field._field_type = "later", dataclasses._FIELD
    monkeypatch.setitem(LoggingConfig.__dataclass_fields__, "later", field)
    monkeypatch.setattr(LoggingConfig, "later", 1, raising=False)
    assert changed("") != before


def test_option_without_an_encoding_is_refused_by_its_path():
    with pytest.raises(ConfigError, match=r"vllm_config\.cache_config\.block_size is of type"):
        changed("cache_config", block_size=object())


def test_versions_and_variables_of_vllm_change_the_name(vllm, monkeypatch):
    before = changed("")
    monkeypatch.setenv("VLLM_PORT", "4000")
    assert changed("") == before
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert changed("") != before
    monkeypatch.delenv("VLLM_MLA_DISABLE")
    vllm.__version__ = "0.32.1"
    assert changed("") != before


def test_variables_are_those_of_vllm_without_excluded_ones():
    given = {
        "VLLM_MLA_DISABLE": "1",
        "VLLM_NEW": "a",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HOME": "/root",
    }
    assert environment(given) == {"VLLM_MLA_DISABLE": "1", "VLLM_NEW": "a"}


def test_files_of_a_multimodal_processor_change_the_name(tmp_path):
    file = tmp_path / "preprocessor_config.json"
    file.write_text("{}")
    (tmp_path / "README.md").write_text("a")
    given = {"model": str(tmp_path), "multimodal_config": SimpleNamespace()}
    before = changed("model_config", **given)
    (tmp_path / "README.md").write_text("b")
    assert changed("model_config", **given) == before
    file.write_text('{"do_resize": false}')
    assert changed("model_config", **given) != before


def test_each_field_is_listed_once_with_a_reason():
    listed = [field for fields in REASONS.values() for field in fields]
    assert len(listed) == len(set(listed)) == len(FIELDS)
    assert all(field.count(".") == 1 for field in listed)
    names = [name for each in VARIABLES.values() for name in each]
    assert len(names) == len(set(names))
