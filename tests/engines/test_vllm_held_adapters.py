"""Adapters of a worker are named by the tensors that vLLM's manager of adapters holds."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvtrie.engines.vllm.held_adapters import HeldAdapters


class Layer:
    def __init__(self, seed, rank=4):
        draw = torch.Generator().manual_seed(seed)
        self.module_name, self.rank, self.scaling = f"layer {seed}", rank, [1.0, 2.0]
        self.lora_a = [torch.randn(rank, 8, generator=draw), None]
        self.lora_b = torch.randn(8, rank, generator=draw)


class Adapter:
    def __init__(self, ident, seed, rank=4):
        self.id, self.rank, self.is_3d_lora_weight = ident, rank, False
        self.loras = {"q": Layer(seed, rank), "v": Layer(seed + 1, rank)}


class Manager:
    def __init__(self):
        self.held = {}

    def list_adapters(self):
        return dict(self.held)


class Loader:
    """Loads as vLLM's does: an adapter above the largest rank is refused, and the old one stays."""

    def __init__(self, manager, files):
        self._adapter_manager, self.files, self.loads = manager, files, 0

    def add_adapter(self, request):
        self.loads += 1
        seed, rank = self.files[request.lora_path]
        if rank > 8:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank 8")
        manager = self._adapter_manager
        if request.lora_int_id not in manager.held or request.load_inplace:
            manager.held[request.lora_int_id] = Adapter(request.lora_int_id, seed, rank)


def asked(path, ident=1, *, inplace=False):
    return SimpleNamespace(
        lora_name="mine", lora_int_id=ident, lora_path=path, load_inplace=inplace
    )


@pytest.fixture
def worker(monkeypatch):
    module = ModuleType("vllm.lora.worker_manager")
    module.WorkerLoRAManager = Loader
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.worker_manager", module)
    model = torch.nn.Linear(1, 1)
    model.lora_manager = Manager()
    files = {"a": (1, 4), "same": (1, 4), "b": (5, 4), "large": (1, 16)}
    loader = Loader(model.lora_manager, files)
    Loader(Manager(), files)  # of another server in this process
    return SimpleNamespace(held=HeldAdapters([model]), manager=model.lora_manager, loader=loader)


def test_equal_tensors_have_one_name_whatever_their_number(worker):
    worker.held.load(asked("a", 1))
    worker.held.load(asked("same", 2))
    worker.held.load(asked("b", 3))
    one, same, other = (worker.held.digests()[ident] for ident in (1, 2, 3))
    assert one == same != other
    assert len(one) == 32


def test_failed_load_keeps_the_name_of_the_old_adapter(worker):
    worker.held.load(asked("a"))
    before = worker.held.digests()
    worker.held.load(asked("large", inplace=True))
    assert worker.held.digests() == before
    worker.held.load(asked("b", inplace=True))
    assert worker.held.digests() != before


def test_adapter_that_cannot_be_loaded_has_an_empty_name_until_it_is_held(worker, caplog):
    request = asked("large")
    request.lora_name = "mine\nforged\x07" * 99
    worker.held.load(request)
    (message,) = caplog.messages
    assert message.isprintable()
    assert len(message) < 1000
    assert worker.held.digests() == {1: b""}
    worker.loader.files["large"] = (1, 4)
    worker.held.load(asked("large"))
    assert len(worker.held.digests()[1]) == 32


def test_held_adapter_is_not_loaded_again(worker):
    for _ in range(2):
        worker.held.load(asked("a"))
    assert worker.loader.loads == 1


def test_evicted_adapter_has_no_name(worker):
    worker.held.load(asked("a"))
    worker.manager.held.clear()
    assert worker.held.digests() == {}


def test_write_into_a_tensor_is_seen_after_forget(worker):
    worker.held.load(asked("a"))
    before = worker.held.digests()
    worker.manager.held[1].loras["q"].lora_a[0][0, 0] += 1
    assert worker.held.digests() == before
    worker.held.forget()
    assert worker.held.digests() != before


def test_model_without_a_manager_of_adapters_names_none():
    held = HeldAdapters([torch.nn.Linear(1, 1)])
    assert held.digests() == {}
