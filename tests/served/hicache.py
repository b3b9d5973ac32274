"""Parts of SGLang's hierarchical cache that a storage needs, without a GPU and without a model."""

from __future__ import annotations

import benches.peers.stand_ins  # noqa: F401 # isort: skip - without it sglang does not load

import sys
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvtrie.engines.sglang import weights
from kvtrie.engines.sglang.weights import UPDATES

PAGE, PAGES = 8, 32


class HostPool:
    """SGLang's host memory as far as a storage sees it; the real one asks for a GPU."""

    layout, page_size, page_num = "layer_first", PAGE, PAGES

    def __init__(self):
        self.kv = torch.arange(2 * 3 * PAGES * PAGE * 4, dtype=torch.float32)
        self.kv = self.kv.view(2, 3, PAGES * PAGE, 4).to(torch.bfloat16)

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * 3 * PAGE * 4, dtype=torch.bfloat16)

    def get_data_page(self, index, **more):
        assert more in ({}, {"flat": True})
        return self.kv[:, :, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index, page):
        self.kv[:, :, index : index + PAGE] = page.view(2, 3, PAGE, 4)


class StatePool:
    """SGLang's host memory of states as far as a storage sees it: a page is one state."""

    layout, page_size, page_num = "page_first", 1, PAGES // 2

    def __init__(self):
        self.states = torch.arange(PAGES // 2 * 96, dtype=torch.int32).view(-1, 96)

    def get_dummy_flat_data_page(self):
        return torch.zeros(96 * 4, dtype=torch.uint8)

    def get_data_page(self, index, **more):
        assert more in ({}, {"flat": True})
        return self.states[index].view(torch.uint8)

    def set_from_flat_data_page(self, index, page):
        self.states[index] = page.view(torch.int32)


class Attention(torch.nn.Module):
    """An attention layer; SGLang's own asks for its engine."""


class Updater:
    """SGLang's updater of weights, whose module asks for its engine."""


for each in UPDATES:
    setattr(Updater, each, lambda _self, request: request)


def served_model(monkeypatch):
    """A model in this process, as SGLang's workers have one."""
    monkeypatch.setattr(weights, "RadixAttention", Attention)
    module = SimpleNamespace(SchedulerWeightUpdaterManager=Updater)
    monkeypatch.setitem(sys.modules, weights._UPDATER, module)
    layer = torch.nn.Module()
    layer.attn, layer.proj = Attention(), torch.nn.Linear(4, 4)
    layer.register_buffer("scale", torch.ones(2))
    return layer


def config(path, **more):
    extra = {
        "backend_name": "kvtrie",
        "module_path": "kvtrie.engines.sglang.storage",
        "class_name": "KvtrieHiCache",
        "interface_v1": 1,
        "path": str(path),
        **({} if ":" in str(path) else {"blocks": 12}),
    } | more.pop("extra", {})
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": False, "model_name": "tiny",
    }  # fmt: skip
    return HiCacheStorageConfig(**fields | more, extra_config=extra)


def opened(path, pool=None, others=None, **more):
    storage = StorageBackendFactory.create_backend("dynamic", config(path, **more), None)
    storage.register_mem_pool_host(pool or HostPool())
    for name, other in (others or {}).items():
        storage.register_mem_host_pool_v2(other, name)
    storage.on_host_pools_registered()
    return storage


def indices(pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
