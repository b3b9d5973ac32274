"""The backward kernel of attention on the host: compared with its twin and autograd, and in
training."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from attending import asked, built, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from onhost import CUDA, NEEDS_GPP, BrokenHostError, Host
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie._kvtrie import KERNELS as TEXTS
from kvtrie.kernels import ARCHS, attend_backward, attention, attention_backward, flash_backward
from kvtrie.kernels.flash import Flash, takes, width_of
from kvtrie.kernels.flash_backward import FlashBackward, takes_back
from kvtrie.kernels.formats import ROWS
from kvtrie.selective import CacheSettings
from kvtrie.train import LongContextGradients, make_head

EXAMPLES = settings.default.max_examples
# Of a number's size, and of the largest gradient's: sums of roundings grow with what is summed.
FAR = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DIMS = (32, 80, 128)


def drawn_grads(query, keys):
    """The gradient of the output, and what stands in the rows' gradients, wider than the rows."""
    generator = torch.Generator().manual_seed(query.shape[2])
    grad = torch.randn(query.shape, generator=generator).to(query.dtype)
    shape = (*keys.shape[:2], keys.shape[2] + 2, keys.shape[3])
    before = [torch.randn(shape, generator=generator) for _ in range(2)]
    return grad, [each[:, :, : keys.shape[2]] for each in before]


def by_kernel(host, grad, rows, given_, place, scale=None):
    flash = Flash(*given_, **place, scale=scale or given_[0].shape[-1] ** -0.5)
    host.start("attend", flash.launch("attend"))
    back = FlashBackward(flash, grad, *rows)
    back.query_grads.fill_(torch.nan)
    host.start("attend_backward", back.launch())
    return back.query_grads


def close(mine, truth, far):
    size = truth.abs().max().item()
    torch.testing.assert_close(mine.float(), truth.float(), rtol=far, atol=far * max(1.0, size))


def same(host, given_, place):
    """The kernel and the twin, side by side."""
    grad, rows = drawn_grads(*given_[:2])
    assert takes_back(*given_, *rows)
    truths = [each.clone() for each in rows]
    truth = attend_backward(grad, *given_, *truths, **place)
    mine = by_kernel(host, grad, rows, given_, place)
    for found, wanted in zip((mine, *rows), (truth, *truths), strict=True):
        close(found, wanted, FAR[mine.dtype])


@NEEDS_GPP
@pytest.mark.parametrize("dtype", ROWS, ids=ROWS.get)
def test_the_kernel_does_what_the_twin_does(hosts, dtype):
    @given(asked(dtype, DIMS))
    @settings(max_examples=EXAMPLES // 5)
    def check(made):
        same(hosts(dtype, width_of(made[0][0])), *made)

    check()


@NEEDS_GPP
def test_the_kernel_does_what_autograd_does(hosts):
    @given(asked(torch.float32, (32,)), st.sampled_from([None, 0.3]))
    @settings(max_examples=EXAMPLES // 5)
    def check(made, scale):
        given_, place = made
        grad, rows = drawn_grads(*given_[:2])
        before = [each.clone() for each in rows]
        query, keys, values = [each.detach().clone().requires_grad_() for each in given_]
        each = query.shape[1] // keys.shape[1]
        pos = place["token_pos"].repeat_interleave(each, dim=1)[:, :, None]
        now = place["input_pos"] + torch.arange(query.shape[2])[:, None]
        seen = pos <= now
        if place["first"] is not None:
            seen = seen & (pos >= place["first"][:, None, None, None])
        scores = query @ keys.repeat_interleave(each, dim=1).mT * (scale or 32**-0.5)
        weights = scores.masked_fill(~seen, -1e30).softmax(dim=-1) * seen.any(-1, keepdim=True)
        (weights @ values.repeat_interleave(each, dim=1)).backward(grad)
        mine = by_kernel(hosts(torch.float32, 32), grad, rows, given_, place, scale)
        close(mine, query.grad, 3e-5)
        for row, old, truth in zip(rows, before, (keys.grad, values.grad), strict=True):
            close(row, old + truth, 3e-5)  # added to the old gradients

    check()


@NEEDS_GPP
@pytest.mark.parametrize(
    ("sanitizer", "dtype"), [("address", torch.bfloat16), ("thread", torch.float32)]
)
def test_sanitizers_have_nothing_to_say(hosts, sanitizer, dtype):
    @given(asked(dtype, (40,)))
    @settings(max_examples=max(2, EXAMPLES // 20))
    def check(made):
        same(hosts(dtype, 64, sanitizer), *made)

    check()


def broken(folder, old, new, **more):
    """A host whose kernel has one line of another kind."""
    sources = folder / "cuda"
    shutil.copytree(CUDA, sources)
    text = (sources / "attend_backward.cu").read_text()
    assert text.count(old) == 1
    (sources / "attend_backward.cu").write_text(text.replace(old, new))
    return Host(folder, "fp32", "fp32", cuda=sources, width=32, **more)


def simple():
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 2, 9, 16), *torch.randn(2, 1, 1, 40, 16)
    place = {"token_pos": torch.randperm(40).view(1, 1, 40), "input_pos": 20, "first": None}
    return (query, keys, values), place


@NEEDS_GPP
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(share.at[k] - less[asks])", "(share.at[k] + less[asks])"),
        ("token[held] <= until[asks]", "token[held] < until[asks]"),
        ("found[column] += ", "found[column] = "),
    ],
)
def test_a_wrong_kernel_is_seen(tmp_path, old, new):
    host = broken(tmp_path, old, new)
    with pytest.raises(AssertionError, match="not close"):
        same(host, *simple())
    host.close()


@NEEDS_GPP
def test_a_missing_barrier_is_seen(tmp_path):
    old = "        __syncthreads();\n        const ROW* right"
    host = broken(tmp_path, old, old.splitlines()[1], sanitizer="thread")
    with pytest.raises(BrokenHostError, match=r"data race(.|\n)*attend_backward\.cu"):
        same(host, *simple())


@NEEDS_GPP
@pytest.mark.deep
@pytest.mark.parametrize("dtype", ROWS, ids=ROWS.get)
@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_width(hosts, dtype, dim):
    @given(asked(dtype, (dim,)))
    @settings(max_examples=8)
    def check(made):
        same(hosts(dtype, width_of(made[0][0])), *made)

    if dim * dtype.itemsize <= 512:
        check()
        return
    rows = torch.zeros(1, 1, 2, dim, dtype=dtype)
    assert takes(rows, rows, rows)
    assert not takes_back(rows, rows, rows, rows.float(), rows.float())


@NEEDS_GPP
def test_training_on_a_device_goes_by_the_kernels(hosts, monkeypatch):
    """The operator of a cell, with kernels on the host in place of a device's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, dtype="float32"))
    cache = CacheSettings("h2o-default", 16, 8, cache_kwargs={"grace_period": 3})
    ids = torch.randint(60, (2, 33))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    started = []

    def start(kernel, what, device):
        del device
        started.append(kernel)
        hosts(torch.float32, 32).start(kernel, what)

    def found():
        tool = LongContextGradients(model, make_head("next_token_prediction", model), cache)
        loss = tool.gradients(ids, ids[:, -10:], attention_mask=mask)
        grads = [weight.grad for weight in model.parameters()]
        model.zero_grad()
        return loss, grads

    truth, wanted = found()
    for module in (attention, attention_backward):
        monkeypatch.setattr(module, "ready", lambda _: True)
    monkeypatch.setattr(flash_backward, "start", start)
    monkeypatch.setattr(Flash, "_start", lambda _, kernel, what: start(kernel, what, None))
    loss, grads = found()
    assert started.count("attend_backward") == 2 * 3  # layers and steps after the prefill
    torch.testing.assert_close(loss, truth, rtol=1e-5, atol=1e-5)
    for mine, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_without_a_gpu_and_without_spills(arch):
    # Each format on two architectures, in two widths; every width is one of `deep`'s.
    dtype, width = drawn(arch)
    built("attend_backward", arch, ROWS[dtype], min(width, 512 // dtype.itemsize))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ROWS, ids=ROWS.get)
@pytest.mark.parametrize("width", range(32, 257, 32))
def test_every_width_compiles(dtype, width):
    if width * dtype.itemsize <= 512:
        built("attend_backward", "sm_80", ROWS[dtype], width)


def test_arguments_fit_the_signature():
    text = TEXTS["attend_backward.cu"]
    signature = re.search(r"\(2 \* OWN\) attend_backward\((.*?)\) \{", text, re.DOTALL)
    pointers = ["*" in each for each in signature[1].split(",")]
    rows = torch.randn(2, 2, 6, 32)
    pos = torch.arange(6).expand(2, 2, 6)
    flash = Flash(rows, rows, rows, token_pos=pos, input_pos=3, first=pos[:, 0, 0], scale=0.5)
    what = FlashBackward(flash, rows, rows.clone(), rows.clone()).launch()
    for each, pointer in zip(what.arguments, pointers, strict=True):
        assert isinstance(each, torch.Tensor if pointer else int)


def test_what_the_kernel_does_not_take_goes_torchs_way(monkeypatch):
    started = []
    for module in (attention, attention_backward):
        monkeypatch.setattr(module, "ready", lambda _: True)
    monkeypatch.setattr(flash_backward, "start", lambda kernel, *_: started.append(kernel))
    monkeypatch.setattr(Flash, "_start", lambda _, kernel, __: started.append(kernel))
    rows = torch.randn(1, 2, 6, 32)
    place = {"token_pos": torch.arange(6).expand(1, 2, 6), "input_pos": 0}
    grad = rows.mT.contiguous().mT  # its rows do not begin at vectors: it is copied
    attend_backward(grad, rows, rows, rows, rows.clone(), rows.clone(), **place)
    assert started == ["attend", "attend_backward"]
    for strange, added in (
        ((rows[..., :30],) * 3, rows[..., :30].clone()),  # no whole number of vectors
        ((rows,) * 3, rows.double()),  # gradients that are no fp32
        ((rows.repeat(1, 1, 1, 5),) * 3, rows.repeat(1, 1, 1, 5)),  # too wide for a block
    ):
        attend_backward(strange[0], *strange, added, added.clone(), **place)
    assert started == ["attend", "attend_backward"]
