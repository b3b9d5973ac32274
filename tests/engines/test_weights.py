"""The digest of loaded weights: any bit of any tensor changes it, and nothing else does."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrie.engines.identity import weights
from kvtrie.engines.identity.weights import (
    checkpoint_digest,
    digest,
    files_digest,
    owners,
    packed_away,
    tensors_of,
)
from kvtrie.errors import ConfigError

pytestmark = pytest.mark.engine

TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


class Quantised(torch.nn.Module):
    """A parameter and a buffer of each type, as a quantised layer keeps numbers and scales."""

    def __init__(self):
        super().__init__()
        self.kv = torch.nn.Linear(5, 3)
        draw = torch.Generator().manual_seed(1)
        for at, kind in enumerate(TYPES):
            data = torch.randint(0, 2, (3, 7), generator=draw).to(kind)
            self.register_parameter(f"p{at}", torch.nn.Parameter(data, requires_grad=False))
            self.register_buffer(f"b{at}", data.clone().t(), persistent=bool(at % 2))
        self.register_buffer("_k_scale", torch.tensor(0.5))


MODEL = Quantised()


def of(model):
    return digest(tensors_of([model]))


def device_sums(model):
    """Sums of a model's weights as a device computes them, on the CPU."""
    return [
        row.tolist()
        for name, tensor in tensors_of([model])
        for row in weights._row_sums(weights._flat(name, tensor)[0])
    ]


def bytes_of(tensor):
    """A view of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),)
    )


@pytest.mark.parametrize("how", [of, device_sums])
def test_any_bit_of_any_tensor_changes_the_digest(how):
    before = how(MODEL)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def flip(data):
        tensors = dict(tensors_of([MODEL]))
        name = data.draw(st.sampled_from(sorted(tensors)))
        memory = bytes_of(tensors[name].detach())
        bit = data.draw(st.integers(0, 8 * len(memory) - 1))
        memory[bit // 8] ^= 1 << bit % 8
        try:
            assert how(MODEL) != before
        finally:
            memory[bit // 8] ^= 1 << bit % 8
        assert how(MODEL) == before

    flip()


def sums(flat):
    return [row.tolist() for row in weights._row_sums(flat, row=1 << 12)]


ROWS = torch.arange(2**20 + 44, dtype=torch.int64).to(torch.uint8)  # 64 rows and a part of one
BEFORE = sums(ROWS)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**18 + 10), st.integers(0, 31))
def test_a_device_sees_one_bit_of_a_tensor_of_several_rows(at, bit):
    flat = ROWS.clone()
    flat.view(torch.int32)[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert sums(flat) != BEFORE


def test_words_that_change_places_change_the_sums_of_a_device():
    flat = ROWS.clone()
    words = flat.view(torch.int32)
    words[5], words[9] = words[9].clone(), words[5].clone()
    assert sums(flat) != BEFORE


def test_factors_are_odd_and_differ():
    one, two = weights._factors(torch.device("cpu"))
    for lane in (one, two):
        assert (lane & 1).all()
        assert len(lane.unique()) == len(lane)
    assert not torch.isin(one, two).any()
    # A server and the one that comes after it draw the same.
    assert one[0].item() == 48217637115032569


def test_a_copy_elsewhere_has_the_same_digest():
    other = Quantised()
    other.load_state_dict(MODEL.state_dict())
    assert of(other) == of(MODEL)


def test_types_shapes_names_and_order_count():
    a, b = torch.zeros(4), torch.ones(4)
    digests = {
        digest([("a", a), ("b", b)]),
        digest([("a", b), ("b", a)]),
        digest([("a", a), ("c", b)]),
        digest([("a", a.view(2, 2)), ("b", b)]),
        digest([("a", a.view(torch.int32)), ("b", b)]),
        digest([("a", a)]),
        digest([]),
    }
    assert len(digests) == 7
    wide = torch.arange(6.0).view(2, 3)
    assert digest([("a", wide.t())]) != digest([("a", wide.t().contiguous())])
    spaced = torch.arange(12.0).view(3, 4)[:, :2]
    assert digest([("a", spaced)]) == digest([("a", spaced.contiguous())])


def test_tensors_made_of_others_are_taken_apart():
    class Shared(torch.nn.Parameter):
        pass

    model = torch.nn.Module()
    model.whole = Shared(torch.empty(0))
    model.whole.partitions = {0: torch.zeros(2), 1: torch.ones(2)}
    assert [name for name, _ in tensors_of([model])] == ["0.whole.0", "0.whole.1"]
    before = of(model)
    model.whole.partitions[1][0] = 3
    assert of(model) != before


def test_a_tensor_without_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"tensor w \(torch.float32 on meta\) cannot be read"):
        digest([("w", torch.empty(3, device="meta"))])


def test_models_are_found_by_a_layer_of_theirs():
    target = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(1, 1)]), torch.nn.ReLU())
    draft = torch.nn.ModuleDict({"only": torch.nn.Linear(1, 1)})
    unrelated = torch.nn.Sequential(torch.nn.Linear(1, 1))
    found = owners([target[0][0], draft["only"]])
    assert [id(each) for each in found] == [id(draft), id(target)]
    plain = torch.nn.Linear(1, 1)
    assert owners([plain]) == [plain]
    del unrelated
    gc.collect()


def test_weights_that_a_kernel_keeps_are_noticed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].g_idx = torch.nn.Parameter(torch.empty(0))
    assert not packed_away([model])
    model[0].weight = torch.nn.Parameter(torch.empty(0))
    assert packed_away([model])


def test_any_bit_of_a_file_changes_its_digest_and_its_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 100)
    data = bytes(range(256))
    weights_file, other_folder = tmp_path / "w.bin", tmp_path / "other"
    weights_file.write_bytes(data)
    other_folder.mkdir()
    (other_folder / "w.bin").write_bytes(data)
    before = files_digest([weights_file])
    assert files_digest([other_folder / "w.bin"]) == before
    for at in (0, 99, 100, 128, 255):
        weights_file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert files_digest([weights_file]) != before


def test_a_checkpoint_is_its_files_of_weights_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-1.safetensors").write_bytes(b"one")
        (tmp_path / name / "model-2.safetensors").write_bytes(b"two")
    (tmp_path / "b" / "README.md").write_text(tmp_path.name)
    first = checkpoint_digest(str(tmp_path / "a"), None, None)
    assert checkpoint_digest(str(tmp_path / "b"), None, None) == first
    (tmp_path / "b" / "model-2.safetensors").write_bytes(b"twp")
    assert checkpoint_digest(str(tmp_path / "b"), None, None) not in {first, None}
    (tmp_path / "none").mkdir()
    assert checkpoint_digest(str(tmp_path / "none"), None, None) is None
    assert checkpoint_digest("nobody/nothing", None, str(tmp_path)) is None
