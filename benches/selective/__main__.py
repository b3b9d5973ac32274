"""Cost of a selective cache: attention with weights, a full cache, memory, bookkeeping.

    make bench-selective
    make bench-selective ARGS="--quick"

Both sides of a row run in turn in one process, on one thread, in CPU time; ratios are of medians.
The model is of SmolLM2-135M's shape, of six layers with random weights; `--quick` takes small
sizes and checks that it runs.
Cost: some minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benches.core.place import place
from benches.measure import clear_peak, peak_kilobytes
from benches.record import Result, bounded, document, keep, options, show
from kvtrie.kernels import attend, attend_masked, attend_padded
from kvtrie.selective import CacheSettings, SelectiveCache, make_cache

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parents[1] / "results" / "selective.json"
HEADS, GROUPS, DIM = 9, 3, 64
SHAPES = ((1, 1024), (128, 1024), (128, 4096), (512, 4096))
ATTEND, FULL, MEMORY, BOOKKEEPING = 1.4, 1.25, 1.1, 0.20
MASKED = "torch's masked SDPA, no weights"


def paired(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Median CPU seconds of two calls that run in turn."""
    both: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds + 1):
        for call, spent in zip((ours, peer), both, strict=True):
            start = time.process_time()
            call()
            if at:  # the first round warms up
                spent.append(time.process_time() - start)
    return median(both[0]), median(both[1])


def attends(given: argparse.Namespace) -> list[Result]:
    """Attention with weights, compared with torch's masked kernel without."""
    rows: list[Result] = []
    for new, length in SHAPES:
        if given.quick and new * length > 1 << 12:
            continue
        query = torch.randn(1, HEADS, new, DIM)
        keys, values = torch.randn(2, 1, GROUPS, length, DIM)
        pos = torch.rand(1, GROUPS, length).argsort(dim=-1)
        start = length - new

        def ours(query=query, keys=keys, values=values, pos=pos, start=start):
            return attend(
                query, keys, values, token_pos=pos, input_pos=start, return_attn_weights=True
            )

        mask = (pos[:, :, None, :] <= torch.arange(start, length)[:, None]).repeat_interleave(3, 1)

        spread = [each.repeat_interleave(HEADS // GROUPS, 1) for each in (keys, values)]

        def peer(query=query, spread=spread, mask=mask):
            return torch.nn.functional.scaled_dot_product_attention(query, *spread, attn_mask=mask)

        one, other = paired(ours, peer, given.rounds * (8 if new == 1 else 1))
        rows.append(bounded(f"attend {new} x {length}", one * 1e3, other * 1e3, "ms", MASKED))
    mean = math.prod(row.ours / row.peer for row in rows) ** (1 / len(rows))
    return [*rows, bounded("attend, geometric mean", mean, 1.0, "times", MASKED, ATTEND)]


def padding(given: argparse.Namespace) -> list[Result]:
    """From how many queries on padding them to a square beats torch's kernel under a mask."""
    rows: list[Result] = []
    for length in (256,) if given.quick else (256, 512, 1024, 2048):
        keys, values = torch.randn(2, 1, GROUPS, length, DIM)
        pos = torch.rand(1, GROUPS, length).argsort(dim=-1)
        for new in (length // 8, length // 2):
            query = torch.randn(1, HEADS, new, DIM)
            given_too = {"query": query, "keys": keys, "values": values, "token_pos": pos}

            def padded(rest=given_too):
                return attend_padded(**rest)

            def masked(rest=given_too, start=length - new):
                return attend_masked(**rest, input_pos=start)

            one, other = paired(padded, masked, given.rounds)
            what = f"padded queries, {new} x {length}"
            rows.append(bounded(what, one * 1e3, other * 1e3, "ms", "under a mask"))
    return rows


def model_of(given: argparse.Namespace) -> LlamaForCausalLM:
    """SmolLM2's shape, of fewer layers where it is to be quick."""
    torch.manual_seed(0)
    layers = 2 if given.quick else 6
    config = LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=1 << 20,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def full(given: argparse.Namespace) -> list[Result]:
    """A full cache compared with that of transformers, with equal keys and steps."""
    model, length = model_of(given), 256 if given.quick else 1024
    rows: list[Result] = []
    for name in ("h2o-default", "keydiff-default", "h2o-torch-quantized8"):
        for new in (1, 128):
            ids = torch.randint(1, 1000, (1, length + new))
            with SelectiveCache(model, CacheSettings(name, cache_length=length)) as cache:
                cache.read(ids[:, :length])
                plain = DynamicCache(config=None)
                model(ids[:, : length - new], past_key_values=plain)

                def ours(cache=cache, ids=ids, new=new):
                    return model(ids[:, -new:], past_key_values=cache)

                def peer(plain=plain, ids=ids, new=new):
                    model(ids[:, -new:], past_key_values=plain)
                    plain.crop(-new)

                one, other = paired(ours, peer, given.rounds * (8 if new == 1 else 1))
            what = f"full cache, {name}, a step of {new}"
            if name == "h2o-default":
                rows.append(bounded(what, one * 1e3, other * 1e3, "ms", "DynamicCache", FULL))
            else:
                rows.append(bounded(what, one * 1e3, other * 1e3, "ms", "DynamicCache"))
    return rows


def bookkeeping(given: argparse.Namespace) -> list[Result]:
    """Time of a step outside of attention."""
    length, new = (512, 32) if given.quick else (4096, 128)
    cache = make_cache(
        "h2o-default", batch=1, kv_heads=GROUPS, query_heads=HEADS, cache_length=length,
        head_dim=DIM, dtype=torch.float32, grace_period=64,
    )  # fmt: skip
    query = torch.randn(1, HEADS, length, DIM)
    keys, values = torch.randn(2, 1, GROUPS, length, DIM)
    cache(query, keys, values)
    step = [each[:, :, :new].contiguous() for each in (query, keys, values)]

    def attention():
        pairs = cache.keys_values()
        attend(
            step[0], *pairs, token_pos=cache.token_pos, input_pos=cache.input_pos,
            return_attn_weights=True,
        )  # fmt: skip

    whole, attention_s = paired(lambda: cache(*step), attention, given.rounds * 2)
    share = max(0.0, (whole - attention_s) / whole)
    what = f"bookkeeping, share of a step, {new} x {length}"
    return [bounded(what, share, 1.0, "", "-", BOOKKEEPING)]


def memory(given: argparse.Namespace) -> list[Result]:
    """Peak memory beyond the loaded model's, at 4 and at 16 lengths of the cache; and buffers."""
    rows: list[Result] = []
    for name in ("h2o-default", "h2o-torch-quantized8"):
        peaks = [peak(name, times, given) for times in (4, 16)]
        rows.append(
            bounded(f"memory, {name}, 16 L beside 4 L", peaks[1], peaks[0], "MB", "at 4 L", MEMORY)
        )
    plain = None
    for buffers in ("default", "torch-quantized8", "torch-quantized4", "int8", "fp8"):
        cache = make_cache(
            f"h2o-{buffers}", batch=1, kv_heads=8, query_heads=8, cache_length=1024, head_dim=128,
            dtype=torch.bfloat16,
        )  # fmt: skip
        bytes_per = cache.buffers.nbytes / (2 * 8 * 1024 * 128)
        plain = bytes_per if plain is None else plain
        rows.append(
            bounded(f"memory of a value, {buffers}", bytes_per, plain, "bytes", "bfloat16, default")
        )
    return rows


def peak(name: str, times: int, given: argparse.Namespace) -> float:
    """Megabytes at most, beyond those of the loaded model, in another process."""
    if given.quick:
        return measure_peak(name, times, given)
    words = [sys.executable, "-m", "benches.selective", "--peak", name, str(times)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@torch.no_grad()
def measure_peak(name: str, times: int, given: argparse.Namespace) -> float:
    """Read `times` lengths of the cache and see what it took."""
    model, length = model_of(given), 128 if given.quick else 512
    model(torch.ones(1, 8, dtype=torch.int64))
    before = clear_peak()
    with SelectiveCache(
        model, CacheSettings(name, cache_length=length, chunk_size=128), yarn_rope=False
    ) as cache:
        cache.read(torch.randint(1, 1000, (1, times * length)))
    return (peak_kilobytes() - before) / 1e3


def main() -> int:
    """Measure, print and keep."""
    parser = options(__doc__, RESULTS)
    parser.add_argument("--rounds", type=int, default=None, help="of each pair (default: 9)")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 9)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.peak:
        print(measure_peak(given.peak[0], int(given.peak[1]), given))
        return 0
    rows = [row for part in (attends, padding, full, memory, bookkeeping) for row in part(given)]
    if not keep(given, document(place() | {"torch": torch.__version__}, rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
