"""The kernels of attention on the host, against the twin; under sanitizers; and as machine code."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from attending import asked, built, drawn
from hypothesis import given, settings
from onhost import CUDA, NEEDS_GPP, BrokenHostError, Host

from kvtrie._kvtrie import KERNELS as TEXTS
from kvtrie.kernels import ARCHS, attend, attention
from kvtrie.kernels.flash import Flash, takes, width_of
from kvtrie.kernels.formats import ROWS

EXAMPLES = settings.default.max_examples
FAR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDTHS = (16, 80, 256)
KERNELS = ("attend", "attend_weights")


def same(host, given_, place):
    """Both ways, side by side."""
    out, weights = attend(*given_, **place, return_attn_weights=True)
    assert takes(*given_)
    flash = Flash(*given_, **place, scale=given_[0].shape[-1] ** -0.5)
    flash.weights.fill_(torch.nan)
    flash.out.fill_(torch.nan)
    for kernel in KERNELS:
        host.start(kernel, flash.launch(kernel))
    far = FAR[out.dtype]
    torch.testing.assert_close(flash.out, out, rtol=far, atol=far)
    torch.testing.assert_close(flash.weights, weights, rtol=1e-4, atol=1e-4)


@NEEDS_GPP
@pytest.mark.parametrize("dtype", ROWS, ids=ROWS.get)
def test_the_kernels_do_what_the_twin_does(hosts, dtype):
    @given(asked(dtype, WIDTHS))
    @settings(max_examples=EXAMPLES // 4)
    def check(made):
        same(hosts(dtype, width_of(made[0][0])), *made)

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


@NEEDS_GPP
def test_a_missing_barrier_is_seen(tmp_path):
    text = "        score(scores, asked, held, factor);\n        __syncthreads();\n"
    sources = tmp_path / "cuda"
    shutil.copytree(CUDA, sources)
    before = (sources / "attend.cu").read_text()
    assert text in before
    (sources / "attend.cu").write_text(before.replace(text, text.splitlines()[0] + "\n"))
    host = Host(tmp_path, "fp32", "fp32", sanitizer="thread", cuda=sources, width=32)
    rows = torch.randn(1, 1, 9, 16)
    pos = torch.arange(9).view(1, 1, 9)
    flash = Flash(rows, rows, rows, token_pos=pos, input_pos=0, first=None, scale=1.0)
    with pytest.raises(BrokenHostError, match=r"data race(.|\n)*attend\.cu"):
        host.start("attend", flash.launch("attend"))


@NEEDS_GPP
@pytest.mark.deep
@pytest.mark.parametrize("dtype", ROWS, ids=ROWS.get)
@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_width(hosts, dtype, dim):
    @given(asked(dtype, (dim,)))
    @settings(max_examples=8)
    def check(made):
        same(hosts(dtype, width_of(made[0][0])), *made)

    check()


@NEEDS_GPP
def test_long_rows_and_many_queries(hosts):
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 3, 90, 64), *torch.randn(2, 1, 1, 300, 64)
    pos = torch.randperm(300).view(1, 1, 300)
    place = {"token_pos": pos, "input_pos": 210, "first": None}
    same(hosts(torch.float32, 64), (query * 3, keys, values), place)


@pytest.mark.parametrize("arch", ARCHS)
def test_they_compile_without_a_gpu_and_without_spills(arch):
    # Each format on two architectures, in two widths; every width is one of `deep`'s.
    row, width = drawn(arch)
    for kernel in KERNELS:
        built(kernel, arch, ROWS[row], width)


@pytest.mark.deep
@pytest.mark.parametrize("row", ROWS.values())
@pytest.mark.parametrize("width", range(32, 257, 32))
def test_every_width_compiles(row, width):
    for kernel in KERNELS:
        built(kernel, "sm_80", row, width)


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_fit_the_signature(kernel):
    signature = re.search(rf"\(THREADS\) {kernel}\((.*?)\) \{{", TEXTS[f"{kernel}.cu"], re.DOTALL)
    pointers = ["*" in each for each in signature[1].split(",")]
    rows = torch.randn(2, 2, 6, 32)
    pos = torch.arange(6).expand(2, 2, 6)
    for first in (None, torch.zeros(2, dtype=torch.int64)):
        flash = Flash(rows, rows, rows, token_pos=pos, input_pos=3, first=first, scale=0.5)
        what = flash.launch(kernel)
        for each, pointer in zip(what.arguments, pointers, strict=True):
            assert isinstance(each, (int, torch.Tensor) if pointer else int)
        assert what.block[0] <= 128


def test_the_verb_takes_the_kernels_where_it_can(monkeypatch):
    started = []
    monkeypatch.setattr(attention, "ready", lambda _: True)
    monkeypatch.setattr(Flash, "_start", lambda _, kernel, __: started.append(kernel))
    rows = torch.randn(1, 2, 6, 32)
    place = {"token_pos": torch.arange(6).expand(1, 2, 6), "input_pos": 3}
    attend(rows, rows, rows, **place)
    assert started == ["attend"]
    attend(rows, rows, rows, **place, return_attn_weights=True)
    assert started == ["attend", "attend", "attend_weights"]
    others = [
        (rows[..., :30], rows[..., :30], rows[..., :30]),  # no whole number of vectors
        (rows, rows, rows[..., :16]),  # values of another width
        (rows, rows.requires_grad_(), rows),  # a kernel has no gradient
    ]
    for strange in others:
        attend(*strange, **place)
    assert len(started) == 3
