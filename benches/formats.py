"""How far a real model's logits move when its KV comes back from a host tier in another format.

SmolLM2-135M reads 640 tokens of this repository's documentation. The first 512 are pushed down to
the host and loaded again; the rest is computed after them and compared with one uncached pass in
fp32.
Cost: about a minute on two cores once the model is converted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from benches.core.place import place
from benches.record import keep, options
from kvtrie import BlockManager, Cost, ModelShape, Tier
from kvtrie.cli.progress import watched
from kvtrie.demo.model import smollm, tiny
from kvtrie.engines.transformers import KvtrieCache, fingerprint
from kvtrie.model.layout import Layout
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

TEXT = Path(__file__).parent.parent / "docs" / "design" / "contract.md"
BLOCK, CACHED, TOKENS = 16, 512, 640
LAYOUTS = {
    "float32": Layout(),
    "float16": Layout(dtype="float16"),
    "bfloat16": Layout(dtype="bfloat16"),
    "int8, group": Layout(dtype="int8", scales="group"),
    "int8, token": Layout(dtype="int8", scales="token"),
    "fp8, group": Layout(dtype="float8_e4m3fn", scales="group"),
    "fp8, token": Layout(dtype="float8_e4m3fn", scales="token"),
}


@torch.no_grad()
def behind(model, ids: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, int]:
    """Logits of the tokens after a prefix that has been on a host in `layout`, and its length."""
    shape = ModelShape.from_config(model.config, fingerprint=fingerprint(model))
    tiers = [Tier("gpu", blocks=42), Tier("host", blocks=80, layout=layout)]
    loads = Cost(ns_per_token=1e9)  # computing is so expensive that the plan loads all it can
    manager = BlockManager(shape, tiers, block_tokens=BLOCK, cost=loads)
    with Executor(manager, open_pools(shape, tiers, BLOCK), workers=0) as executor:
        others = torch.randint(1, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        for prompt in (ids[:, :CACHED], others):
            with KvtrieCache(model, executor, prompt) as cache:
                model(prompt, past_key_values=cache)
        executor.drain()
        with KvtrieCache(model, executor, ids) as cache:
            past = cache.get_seq_length()
            return model(ids[:, past:], past_key_values=cache).logits, past


def compared(truth: torch.Tensor, got: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """Difference of two results; `ids` are the tokens that were read."""
    exact, mine = truth.log_softmax(-1), got.log_softmax(-1)

    def perplexity(logs: torch.Tensor) -> float:
        return float((-logs[0, :-1].gather(1, ids[:, None]).mean()).exp())

    return {
        "error of logits": float((got - truth).square().mean().sqrt() / truth.std()),
        "divergence": float((exact.exp() * (exact - mine)).sum(-1).mean()),
        "same best token": float((got.argmax(-1) == truth.argmax(-1)).float().mean()),
        "perplexity": perplexity(mine),
    }


def main() -> None:
    """Reads arguments, measures, prints."""
    given = options(__doc__).parse_args()
    speaker = tiny() if given.quick else smollm(Console(stderr=True))
    ids = torch.tensor([speaker.opening(TEXT.read_text())[:TOKENS]])
    with torch.no_grad():
        truth = speaker.model(ids).logits
    rows = {}
    names = ["float32", "int8, group"] if given.quick else list(LAYOUTS)
    for name in watched(names, "formats", quiet=given.json):
        logits, past = behind(speaker.model, ids, LAYOUTS[name])
        shape = ModelShape.from_config(speaker.model.config)
        bytes_per_block = sum(LAYOUTS[name].planes(BLOCK, shape.kv_heads, shape.head_dim))
        rows[name] = {"bytes of a block": bytes_per_block * shape.layers} | compared(
            truth[:, past:], logits, ids[0, past + 1 :]
        )
    about = place() | {"model": speaker.name, "torch": torch.__version__}
    if keep(given, {"about": about, "formats": rows}):
        return
    print(f"{speaker.name}, {CACHED} tokens loaded, {ids.shape[1] - CACHED} after them")
    for name, row in rows.items():
        print(f"{name:<12}", ", ".join(f"{what} {figure:.4g}" for what, figure in row.items()))


if __name__ == "__main__":
    main()
