"""Breaks on vLLM servers with SmolLM2: the explanation of each; runs in the engine's environment.

    .engines/vllm/bin/python -m benches.eval_why.server --model FOLDER

Prints a line of JSON per break. SmolLM2 reads no images: two of them are asked of vLLM's scheduler
without a model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benches.eval_why.breaks import breaks

SERVED = Path(__file__).parents[2] / "tests" / "served"
HOSTS = {"plain": 700, "small": 72}  # blocks
WHY = {"kvtrie": {"why": True}}
SAID = "placeholder digest"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--kinds", nargs="*", default=[], help="default: all")
    parser.add_argument("--show", action="store_true", help="print the answer of `kvtrie why` too")
    given = parser.parse_args()
    sys.path.insert(0, str(SERVED))
    tokenizer = Tokenizer.from_file(str(Path(given.model) / "tokenizer.json"))
    every = breaks(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    wanted = [one for one in every if not given.kinds or one.kind in given.kinds]
    with tempfile.TemporaryDirectory() as folder:
        for server, blocks in HOSTS.items():
            mine = [one for one in wanted if one.server == server]
            if mine:
                serve_all(given, mine, blocks, Path(folder) / server)
        if not given.kinds or SAID in given.kinds:
            show(digest(Path(folder)))


def show(record):
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def serve_all(given, mine, blocks, folder):
    """Ask all breaks of one server."""
    import servers

    folder.mkdir()
    socket, adapter = folder / "control.sock", adapter_of(given.model, folder / "adapter")
    extra = {
        "tiers": [{"kind": "host", "blocks": blocks}],
        "policy": "lru",
        "why_min_tokens": 16,
        "why_clients": True,
        "control": str(socket),
    }
    more = (
        {"enable_lora": True, "max_lora_rank": 8}
        if any("adapter" in one.asked_with for one in mine)
        else {}
    )
    with servers.serve(given.model, extra, max_model_len=1024, **more) as server:
        for one in mine:
            for prompt in one.cached:
                ask(server, prompt)
            show(record_of(one, *ask(server, one.asked, adapter, why=True, **one.asked_with)))
        if given.show:
            command = [sys.executable, "-m", "kvtrie", "why", str(socket)]
            command += ["--show-text", given.model]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            sys.stderr.write(said)


def ask(server, prompt, path=None, *, why=False, salt=None, adapter=False):
    """Answer a prompt with one token; return the state in its answer, and its explanation."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        extra_args={"kv_transfer_params": WHY} if why else None,
    )
    request = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    lora = LoRARequest("support", 1, path) if adapter else None
    (output,) = server.llm.generate([request], sampling, use_tqdm=False, lora_request=lora)
    server.wait_for_stores()
    server.kv_scheduler.why.drain()
    if not why:
        return None
    state = output.kv_transfer_params["kvtrie"]["why"]["state"]
    return state, server.kv_scheduler.why.answer(output.request_id)


def record_of(one, state, answer):
    """The record of a break."""
    causes = {}
    for first, last, cause in answer["causes"]:
        causes[cause] = causes.get(cause, 0) + last - first
    computed = answer["causes"][0][0]
    return {
        "kind": one.kind,
        "expected": one.cause,
        "token": one.token,
        "causes": causes,
        "at": answer["diverged_at"] if one.parts else computed,
        "computed": answer["computed"],
        "recurring": max((branch["recurring"] for branch in answer.get("branches", ())), default=0),
        "detail": answer.get("detail", ""),
        "answered": state == "explained",
    }


def adapter_of(model, folder):
    """Save an adapter of random weights."""
    config = json.loads((Path(model) / "config.json").read_text())
    folder.mkdir()
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["v_proj"]}
    about |= {"bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    torch.manual_seed(0)
    size, out = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, size) / 100
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, 4) / 100
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def digest(folder):
    """Another image in the same place of a prompt."""
    from modelfree import SIZE, WORDS
    from vllm_events import engine_of, image
    from vllm_schedules import write_model

    draw = random.Random(0)
    prompt = [draw.randrange(WORDS) for _ in range(12 * SIZE)]
    model = folder / "model"
    model.mkdir()
    engine, _ = engine_of(write_model(model), "", 0)
    at = 3 * SIZE + 5
    for name in ("first", "second"):
        engine.add(name, prompt, 1, mm_features=[image(name, at)])
        engine.prompts[name][2].kv_transfer_params = WHY
        engine.drain()
        engine.kv_scheduler.why.drain()
    answer = engine.kv_scheduler.why.answer("second")
    engine.close()
    causes = {}
    for first, last, cause in answer["causes"]:
        causes[cause] = causes.get(cause, 0) + last - first
    return {
        "kind": SAID,
        "expected": "other scope",
        "token": at,
        "causes": causes,
        "at": answer["diverged_at"],
        "computed": answer["computed"],
        "recurring": 0,
        "detail": "scheduler without a model",
        "answered": True,
    }


if __name__ == "__main__":
    main()
