"""Images of a request are named by their tensors, and never by what a client called them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvtrie.engines.vllm.media import content_of, name_by_content, name_media


class Item(dict):
    def get_data(self):
        return dict(self)


class Feature:
    def __init__(self, pixels, uuid="a", *, offset=3, length=4, is_embed=None, **more):
        given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 2, 2])} | more
        self.data = None if pixels is None else Item(given)
        self.identifier = self.mm_hash = uuid
        self.modality = "image"
        self.mm_position = SimpleNamespace(offset=offset, length=length, is_embed=is_embed)


def named(*args, **more):
    feature = Feature(*args, **more)
    name_by_content(feature)
    return feature


RED, BLUE = torch.zeros(3, 2, 2), torch.ones(3, 2, 2)


def test_name_follows_the_tensors_and_not_the_uuid():
    red, again, blue = named(RED, "a"), named(RED.clone(), "b", offset=9), named(BLUE, "a")
    assert red.identifier == again.identifier == content_of(red).hex()
    assert content_of(red) != content_of(blue)
    assert red.identifier != blue.identifier
    assert red.mm_hash == "a"  # by which vLLM's processor keeps its own


@pytest.mark.parametrize(
    "more",
    [
        {"length": 5},
        {"is_embed": torch.tensor([True, True, False, True])},
        {"second_per_grid": [torch.tensor(2.0)]},
        {"image_grid_thw": torch.tensor([1, 4, 1])},
    ],
)
def test_all_that_the_model_reads_is_part_of_the_name(more):
    assert content_of(named(RED, **more)) != content_of(named(RED))


def test_adapter_stays_in_front_of_the_name():
    feature = Feature(RED, "a")
    feature.identifier = "mine:a"
    name_by_content(feature)
    assert feature.identifier == f"mine:{content_of(feature).hex()}"


def test_input_without_its_tensors_has_no_content():
    address = Feature(None)
    address.data = Item(address=4096, monotonic_id=1, signature=[1, 2])
    address.mm_position.is_embed = torch.tensor([True])
    partly = Feature(RED, mask=None)
    odd = Feature(RED, other=object())
    for feature in (Feature(None), address, partly, odd):
        name_by_content(feature)
        assert feature.identifier == "a"
        assert content_of(feature) is None


def test_inputs_of_all_requests_are_named_while_their_owner_lives(monkeypatch):
    class Request(SimpleNamespace):
        @classmethod
        def from_engine_core_request(cls, request, hasher):
            return cls(mm_features=request.mm_features, hashes=hasher(request))

    module = ModuleType("vllm.v1.request")
    module.Request = Request
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.request", module)

    class Owner:
        pass

    def ask(uuid):
        sent = SimpleNamespace(mm_features=[Feature(RED, uuid)])
        made = Request.from_engine_core_request(sent, lambda request: request.mm_features)
        return made.hashes[0].identifier

    owner, other = Owner(), Owner()
    name_media(owner)
    name_media(other)
    assert ask("a") == ask("b") != "a"
    assert Request.from_engine_core_request(SimpleNamespace(mm_features=None), lambda _: 7).hashes
    del owner, other
    assert ask("a") == "a"
