"""Numbers, functions and code of modules that no tensor shows are part of the name of KV."""

import importlib.util
import sys

import pytest
import torch

from kvtrie.engines.identity.module_state import modules_digest


class Kernel:
    def __init__(self):
        self.scale, self.isa, self.workspace = 0.5, "vec", torch.zeros(3)


class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.is_neox_style, self.dtype = 1e4, True, torch.float32
        self.impl, self.quant_method = Kernel(), Kernel()
        self.kv_cache = torch.zeros(8)
        self.sizes, self.config = [1, 2], {"port": 1}


def double(value):
    return value * 2


def halve(value):
    return value / 2


def model(change=lambda _: None):
    made = torch.nn.Sequential(Rotary(), Rotary())
    change(made[1])
    return modules_digest([made])


CHANGES = {
    "number": lambda rotary: setattr(rotary, "base", 5e5),
    "bool": lambda rotary: setattr(rotary, "is_neox_style", False),
    "dtype": lambda rotary: setattr(rotary, "dtype", torch.float16),
    "list": lambda rotary: setattr(rotary, "sizes", [1, 3]),
    "kernel": lambda rotary: setattr(rotary.impl, "isa", "amx"),
    "quantisation": lambda rotary: setattr(rotary, "quant_method", object()),
    "added": lambda rotary: setattr(rotary, "scaling", 1.0),
    "forward": lambda rotary: setattr(rotary, "forward", double),
    "training": lambda rotary: rotary.train(mode=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_module_changes_the_name(change):
    assert model() == model()
    assert model(CHANGES[change]) != model()


def test_another_function_changes_the_name():
    one, other = (
        model(lambda rotary, to=to: setattr(rotary, "forward", to)) for to in (double, halve)
    )
    assert one != other


def test_tensors_and_objects_do_not_change_the_name():
    def change(rotary):
        rotary.kv_cache, rotary.config = torch.ones(9), {"port": 2}
        rotary.impl.workspace = torch.ones(4)

    assert model(change) == model()


def test_code_of_a_model_outside_of_packages_changes_the_name(tmp_path):
    def served(text):
        file = tmp_path / "modeling_mine.py"
        file.write_text(f"import torch\nclass Mine(torch.nn.Module):\n    {text}\n")
        spec = importlib.util.spec_from_file_location("modeling_mine", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules["modeling_mine"] = module
        try:
            spec.loader.exec_module(module)
            return modules_digest([module.Mine()])
        finally:
            del sys.modules["modeling_mine"]

    assert served("pass") == served("pass")
    assert served("pass") != served("forward = None")
