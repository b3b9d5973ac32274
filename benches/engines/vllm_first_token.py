"""One vLLM server in this process: seconds to the first token, as a line of JSON.

`--what none` computes every prompt; `kvtrie` and `offload` compute it, empty vLLM's own cache, and
ask again; with `--disk` host memory holds one prompt, so that the others come from disk, whose
pages the system has been asked to drop. So does `lmcache`, in an environment that has it.
`--restarted` computes nothing first: an earlier server has left the prompts in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
}

import numpy as np
from vllm import LLM, SamplingParams

from benches.engines.launch import ON_GPU, PORTABLE

BLOCK = 32


def transfer(what, room, folder):
    """The `--kv-transfer-config` of a kind of server with host memory of `room` bytes."""
    if what == "none":
        return None
    if what == "lmcache":
        size = str(-(-room // 2**30))
        os.environ |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": size}
        return {"kv_role": "kv_both", "kv_connector": "LMCacheConnectorV1"}
    settings = {"kv_role": "kv_both", "kv_connector": "OffloadingConnector"}
    extra = {"cpu_bytes_to_use": room}
    if not ON_GPU:  # vLLM's own copies need a GPU
        extra |= {
            "spec_name": "PlainOffloadingSpec",
            "spec_module_path": "benches.engines.plain_offload",
        }
    if what == "kvtrie":
        settings["kv_connector"] = "KvtrieConnector"
        extra = {"tiers": [{"kind": "host", "bytes": room}]}
        if folder:
            extra["tiers"].append({"kind": "disk", "blocks": 4096, "path": folder})
    return settings | {"kv_connector_extra_config": extra}


def block_bytes(model, dtype):
    """The bytes of a block of a model in a folder, and the tokens that it knows."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = BLOCK * heads * dim * 2 * layers * (2 if dtype == "bfloat16" else 4)
    return size, config["vocab_size"]


class Timed:
    """A server, and prompts that are answered with one token."""

    def __init__(self, given):
        each = given.tokens // BLOCK + 2
        size, vocabulary = block_bytes(given.model, given.dtype)
        room = size * (each + 2 if given.disk else each * (given.rounds + 2))
        self.vocabulary, self.tokens = vocabulary, given.tokens
        self.llm = LLM(
            given.model,
            skip_tokenizer_init=True,
            dtype=given.dtype,
            block_size=None if given.states else BLOCK,
            max_model_len=given.tokens + 8,
            max_num_batched_tokens=given.tokens + 8,
            num_gpu_blocks_override=each * 2 * given.groups,
            enforce_eager=True,
            disable_log_stats=True,
            kv_transfer_config=transfer(given.what, given.host or room, given.disk),
            **PORTABLE,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def ask(self, seed, tokens=None):
        """Ask for the answer to a seed's prompt, or to its first tokens.

        Returns:
            Seconds to the first token, the number of tokens found, and the token.
        """
        drawn = np.random.default_rng(seed).integers(1, self.vocabulary, self.tokens)
        prompt = [{"prompt_token_ids": drawn[:tokens].tolist()}]
        begun = time.perf_counter()
        (output,) = self.llm.generate(prompt, self.sampling, use_tqdm=False)
        took = time.perf_counter() - begun
        return took, output.num_cached_tokens or 0, output.outputs[0].token_ids[0]

    def end_stores(self, folder):
        """Let stores end, and empty vLLM's cache and the system's."""
        connector = self.core.scheduler.connector
        until = time.monotonic() + 60
        while connector is not None and time.monotonic() < until:
            self.core.step_fn()
            if not (self.core.scheduler.has_requests() or connector.has_pending_push_work()):
                break
        for _ in range(20):
            self.core.step_fn()
        assert self.llm.reset_prefix_cache()
        for path in Path(folder).rglob("*") if folder else ():
            if path.is_file():
                with path.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=["none", "kvtrie", "offload", "lmcache"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default="", help="folder of a disk tier")
    parser.add_argument(
        "--host", type=int, help="bytes of host memory, where the prompts' KV differs"
    )
    parser.add_argument("--groups", type=int, default=1, help="vLLM's groups of layers")
    parser.add_argument("--states", action="store_true", help="vLLM chooses the tokens of a block")
    parser.add_argument("--restarted", action="store_true", help="the folder has the prompts")
    given = parser.parse_args()
    timed = Timed(given)
    timed.ask(1_000_000)  # compiles what is compiled at first use
    timed.end_stores("")  # or what it wrote leaves the next prompt no room on host
    if given.what == "lmcache" and not timed.ask(1_000_000)[1]:
        sys.exit("LMCache has kept nothing")  # without copiers for its device it says so, and runs
    computed, found, right = [], [], {}
    for seed in range(0 if given.restarted else given.rounds):
        took, _, right[seed] = timed.ask(seed)
        computed.append(took)
        timed.end_stores("")
    timed.end_stores(given.disk)
    for seed in range(given.rounds if given.what != "none" else 0):
        took, cached, token = timed.ask(seed)
        assert token == right.get(seed, token), "another token than the one that was computed"
        assert cached or not given.restarted, "an earlier server's prompt was not found"
        found.append((took, cached))
        timed.end_stores(given.disk)
    settings = {
        "what": given.what,
        "disk": bool(given.disk),
        "computed_s": computed,
        "found": found,
    }
    sys.stdout.write(json.dumps(settings) + "\n")


if __name__ == "__main__":
    main()
