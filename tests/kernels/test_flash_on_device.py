"""The kernels of attention on a CUDA device, against the twin on the CPU."""

from __future__ import annotations

import pytest
import torch

from kvtrie.kernels import attend, attend_backward
from kvtrie.kernels.flash import ready, takes
from kvtrie.kernels.flash_backward import takes_back

pytestmark = pytest.mark.gpu

FAR = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", FAR, ids=str)
@pytest.mark.parametrize(("new", "rows"), [(1, 1024), (77, 300), (128, 4096)])
def test_the_kernels_do_what_the_twin_does(dtype, dim, new, rows, padded):
    torch.manual_seed(0)
    query = torch.randn(2, new, 8, dim).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(2, 2, rows, dim).to(dtype) for _ in range(2))
    pos = torch.stack([torch.randperm(rows) for _ in range(4)]).view(2, 2, rows)
    first = torch.tensor([0, rows // 3]) if padded else None
    place = {"token_pos": pos, "input_pos": rows - new, "first": first}
    out, weights = attend(query, keys, values, **place, return_attn_weights=True)
    on_gpu = [each.cuda() for each in (query, keys, values)]
    at = {name: each.cuda() if torch.is_tensor(each) else each for name, each in place.items()}
    assert ready(on_gpu[0].device)
    assert takes(*on_gpu)
    mine, theirs = attend(*on_gpu, **at, return_attn_weights=True)
    torch.testing.assert_close(mine.cpu(), out, rtol=FAR[dtype], atol=FAR[dtype])
    torch.testing.assert_close(theirs.cpu(), weights, rtol=1e-3, atol=1e-3)
    again, same = attend(*on_gpu, **at, return_attn_weights=True)
    assert torch.equal(again, mine)  # the same bits each time
    assert torch.equal(same, theirs)


def test_what_kernels_do_not_take_goes_torchs_way():
    rows = torch.randn(1, 2, 9, 30, device="cuda")
    pos = torch.arange(9, device="cuda").expand(1, 2, 9)
    out, _ = attend(rows, rows, rows, token_pos=pos, input_pos=0)
    alone, _ = attend(
        *(each.cpu() for each in (rows, rows, rows)), token_pos=pos.cpu(), input_pos=0
    )
    torch.testing.assert_close(out.cpu(), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", FAR, ids=str)
@pytest.mark.parametrize(("new", "rows"), [(1, 1024), (77, 300), (128, 4096)])
def test_gradients_are_those_of_the_twin(dtype, dim, new, rows, padded):
    torch.manual_seed(0)
    query = torch.randn(2, new, 8, dim).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(2, 2, rows, dim).to(dtype) for _ in range(2))
    grad, added = torch.randn(query.shape).to(dtype), torch.randn(2, *keys.shape)
    pos = torch.stack([torch.randperm(rows) for _ in range(4)]).view(2, 2, rows)
    first = torch.tensor([0, rows // 3]) if padded else None
    place = {"token_pos": pos, "input_pos": rows - new, "first": first}
    at = {name: each.cuda() if torch.is_tensor(each) else each for name, each in place.items()}
    given = [each.cuda() for each in (grad, query, keys, values)]
    found = []
    for _ in range(2):
        on_gpu = added.cuda()
        assert takes_back(*given[1:], *on_gpu)
        found.append((attend_backward(*given, *on_gpu, **at), *on_gpu))
    truth = (attend_backward(grad, query, keys, values, *added, **place), *added)
    for mine, again, wanted in zip(*found, truth, strict=True):
        assert torch.equal(again, mine)  # the same bits each time
        size = FAR[dtype] * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(mine.cpu(), wanted, rtol=FAR[dtype], atol=size)
