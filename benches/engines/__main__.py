"""Time to the first token in vLLM, computed and from each tier, with ratios.

    python -m benches.engines

SmolLM2-135M, prompts of 2,000 random tokens, one at a time. Figures go to `--json FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
GOALS = {"ttft host": 12, "ttft disk": 6, "beside offload": 1, "miss": 0.97}


def model_folder(console, folder, *, tiny):
    """Where the model's files are: SmolLM2 as the demo converts it, or a small random one."""
    from kvtrie.demo import model

    if not tiny:
        model.smollm(console)
        return str(next(model.cache_folder().glob("smollm2-135m-instruct-*")))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def measure(given, model, what, disk=""):
    """The figures of one server, from a process of its own."""
    arguments = ["--what", what, "--model", model, "--dtype", given.dtype]
    arguments += ["--tokens", str(given.tokens), "--rounds", str(given.rounds)]
    command = [PYTHON, "-m", "benches.engines.vllm_first_token", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [*command, "--disk", disk], cwd=ROOT, env=env, check=False, capture_output=True, text=True
    )
    if told.returncode:
        last = [line for line in told.stderr.splitlines() if line.strip()][-1:]
        return {"what": what, "error": " ".join(last)}
    return json.loads(told.stdout.splitlines()[-1])


def found(figures):
    return median(took for took, _ in figures["found"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiny", action="store_true", help="a random model, in a minute")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(console, Path(folder) / "model", tiny=given.tiny)
        servers = {
            "none": measure(given, model, "none"),
            "host": measure(given, model, "kvtrie"),
            "disk": measure(given, model, "kvtrie", f"{folder}/kv"),
            "offload": measure(given, model, "offload"),
        }
    ratios, table = {}, Table("", "median", "goal", title="Time to the first token")
    if "error" not in servers["none"]:
        computed = median(servers["none"]["computed_s"])
        table.add_row("computed", f"{computed * 1e3:.0f} ms", "")
        if "error" not in servers["host"]:
            ratios["miss"] = computed / median(servers["host"]["computed_s"])
        for name in ("host", "disk"):
            if "error" not in servers[name]:
                ratios[f"ttft {name}"] = computed / found(servers[name])
    if "error" not in servers["host"] and "error" not in servers["offload"]:
        ratios["beside offload"] = found(servers["offload"]) / found(servers["host"])
    for name in ("host", "disk", "offload"):
        if "error" in servers[name]:
            table.add_row(f"from {name}", servers[name]["error"], "")
        else:
            table.add_row(f"from {name}", f"{found(servers[name]) * 1e3:.0f} ms", "")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f}x", f"{GOALS[name]}x")
    console.print(table)
    if given.json:
        told = {"machine": platform.processor(), "cores": os.cpu_count(), "dtype": given.dtype}
        told |= {"tokens": given.tokens, "rounds": given.rounds, "tiny": given.tiny}
        told |= {"ratios": ratios, "goals": GOALS, "servers": servers}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if any("error" in each for each in servers.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
