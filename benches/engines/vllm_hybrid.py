"""vLLM servers of a model with windows: room for KV, bytes that a prompt moves, and memory.

One layer in six attends to all tokens, five to the last 64; prompts are 64 windows long. `--what
room` compares the tokens that fit into vLLM's memory, `moved` the bytes that a prompt takes to host
memory and back with those of a server that keeps all tokens of all layers, `memory` the resident
memory of a server that has filled `--bytes` of host memory, and without them of one that has no
connector; `models` writes the models. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.served import servers  # its settings first

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config  # isort: skip
from benches.engines.vllm_many import resident  # isort: skip
from benches.engines.vllm_scheduler_step import compute_nothing  # isort: skip

WINDOW, WINDOWS = 64, 64
PROMPT = WINDOW * WINDOWS
ALL_LAYERS = {"disable_hybrid_kv_cache_manager": True}
FILL = 60  # prompts that fill host memory


def host(size):
    """Settings of a server with host memory of some bytes; None without any."""
    return {"tiers": [{"kind": "host", "bytes": size}]} if size else None


def serve(model, size=0, blocks=2048, **more):
    """A server that reads prompts in pieces of some windows, as long prompts are read."""
    more = {"max_model_len": PROMPT + 64, "max_num_batched_tokens": 512} | more
    return servers.serve(model, host(size), blocks=blocks, **more)


def room(model):
    """Tokens of such prompts that fit into a gibibyte of vLLM's memory, by server."""
    tokens = {}
    for name, size, more in (
        ("none", 0, {}),
        ("kvtrie", 2**26, {}),
        ("all layers", 0, ALL_LAYERS),
    ):
        with serve(model, size, blocks=None, max_model_len=PROMPT, **more) as server:
            core = server.core
            caches = core.scheduler.kv_cache_config
            fit = get_max_concurrency_for_kv_cache_config(core.vllm_config, caches)
            tokens[name] = fit * PROMPT
    return {"tokens": tokens}


def moved(model):
    """Bytes that a prompt moves to host memory, and back when it returns, by server.

    Host memory is empty, so that windows which nothing needs are kept too, and then full.
    """
    figures = {}
    for name, more in (("groups", {}), ("all layers", ALL_LAYERS)):
        with serve(model, 2**26, **more) as server:
            figures[name] = {"empty": there_and_back(server, 0)}
            fill(server)
            assert server.kv_scheduler.manager.stats().tiers["host"].dropped, "host is not full"
            figures[name]["full"] = there_and_back(server, 1)
            server.check()
    return {"bytes": figures}


def there_and_back(server, seed):
    """Bytes to host memory by a prompt, and from there when it returns."""
    before = lanes(server)
    prompt = servers.prompt(seed, PROMPT)
    for _ in range(2):
        server.forget()
        server.answers([prompt], tokens=1)
        server.wait_for_stores()
    assert server.found == PROMPT - servers.BLOCK, server.found
    return {lane: size - before[lane] for lane, size in lanes(server).items()}


def lanes(server):
    """Bytes given to the lanes of host memory so far."""
    lanes = server.kv_scheduler.manager.stats().lanes
    return {"to host": lanes["host store"].bytes, "from host": lanes["host read"].bytes}


def fill(server):
    """Serve prompts that are more than host memory holds, if there is any."""
    for seed in range(100, 100 + FILL):
        server.answers([servers.prompt(seed, PROMPT)], tokens=1)
        if server.core.scheduler.connector is not None:
            server.wait_for_stores()
        server.forget()


def memory(model, size):
    """Resident bytes of this process after prompts that fill host memory, its own included."""
    with serve(model, size) as server:
        compute_nothing(server.core, servers.HIDDEN)
        fill(server)
        kept = bytes_kept(server.kv_scheduler.manager) if size else 0
        assert kept >= 0.95 * size, f"{kept} of {size} bytes are in use"
        return {"bytes": size, "kept": kept, "resident": resident()}


def bytes_kept(manager):
    """Bytes of the blocks in host memory."""
    groups = manager.stats().tiers["host"].groups
    each = (manager.model.block_bytes(servers.BLOCK, at) for at in range(len(groups)))
    return sum(size * (one.held + one.released) for size, one in zip(each, groups, strict=True))


def models(folder):
    """Write the models: with windows, with five windows to a layer without, and with states."""
    made = {
        "gemma": servers.tiny_gemma,
        "gemma six groups": lambda path: servers.tiny_gemma(
            path, 5, max_position_embeddings=2 * PROMPT
        ),
        "qwen": servers.tiny_qwen,
    }
    return {"models": {name: make(Path(folder) / name) for name, make in made.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=["models", "room", "moved", "memory"], required=True)
    parser.add_argument("--model", required=True, help="folder; of models, where they are written")
    parser.add_argument("--bytes", type=int, default=0, help="of memory: host memory")
    given = parser.parse_args()
    if given.what == "memory":
        figures = memory(given.model, given.bytes)
    else:
        figures = {"models": models, "room": room, "moved": moved}[given.what](given.model)
    sys.stdout.write(json.dumps({"what": given.what, **figures}) + "\n")


if __name__ == "__main__":
    main()
