"""The layout of KV is named by the bytes that a layer's kernel writes."""

from types import SimpleNamespace

import pytest
import torch

from kvtrie.engines.vllm.layout_check import layouts_digest

TOKENS, HEADS, DIM = 4, 2, 8


class Backend:
    latent = False

    @classmethod
    def is_mla(cls):
        return cls.latent


class LatentBackend(Backend):
    latent = True


class Kernel:
    """Writes K and V of a token side by side."""

    def do_kv_cache_update(self, layer, keys, values, memory, slots):
        assert layer.num_kv_heads == HEADS
        rows = memory.view(-1, TOKENS, 2, HEADS, DIM)
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            rows[slot // TOKENS, slot % TOKENS] = torch.stack((self.placed(key), value))

    def placed(self, key):
        return key


class FlippedKernel(Kernel):
    def placed(self, key):
        return key.flip(-1)


class BrokenKernel(Kernel):
    def do_kv_cache_update(self, *_):
        raise RuntimeError("no such kernel on this device")


class LatentKernel:
    def do_kv_cache_update(self, latent, rotated, memory, slots, dtype, scale):
        assert (dtype, scale) == ("auto", 1.0)
        memory.view(-1, 3 * DIM)[slots] = torch.cat((latent, rotated[:, 0]), 1)


def named(kernel, *, blocks=6, axis=0, backend=Backend, fill=0.0):
    layer = SimpleNamespace(
        attn_backend=backend,
        impl=kernel,
        num_kv_heads=HEADS,
        head_size=DIM,
        kv_lora_rank=2 * DIM,
        qk_rope_head_dim=DIM,
        kv_cache_dtype="auto",
        _k_scale=1.0,
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer, "b": layer}),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    width = 3 * DIM if backend.latent else 2 * HEADS * DIM
    memory = torch.full((blocks, TOKENS, width), fill, dtype=torch.bfloat16)
    shown = memory.movedim(0, axis)
    found = layouts_digest(config, dict.fromkeys("ab", shown), blocks, {"a": TOKENS})
    assert (memory == fill).all()
    return found


def test_other_order_of_numbers_is_another_name():
    assert named(Kernel()) == named(Kernel())
    assert named(type("Kernel", (FlippedKernel,), {"__module__": __name__})()) != named(Kernel())


def test_amount_and_content_of_memory_do_not_change_the_name():
    assert named(Kernel(), blocks=11, fill=3.0) == named(Kernel())


def test_latent_kv_is_written_by_its_own_call():
    assert named(LatentKernel(), backend=LatentBackend) == named(
        LatentKernel(), backend=LatentBackend, blocks=9
    )


def test_kernel_that_cannot_be_called_alone_is_named_by_its_class(caplog):
    caplog.set_level("INFO", "vllm.kvtrie")
    assert named(BrokenKernel()) == named(BrokenKernel())
    assert named(BrokenKernel()) != named(Kernel())
    assert "BrokenKernel: no such kernel on this device" in caplog.text


def test_states_that_are_no_tensor_are_named_by_their_class():
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": Kernel()})
    )
    found = layouts_digest(config, {"a": [torch.zeros(3)]}, 3, {})
    assert found == layouts_digest(config, {"a": [torch.zeros(5)]}, 5, {})


@pytest.mark.parametrize("name", ["a", "other"])
def test_layer_that_vllm_does_not_know_is_named_by_its_tensor(name):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    one = layouts_digest(config, {name: torch.zeros(3, 4)}, 3, {})
    assert one != layouts_digest(config, {name: torch.zeros(3, 5)}, 3, {})
