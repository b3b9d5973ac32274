"""Launch: a measurement in a separate process of an engine's environment, and what it printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
ON_GPU = Path("/dev/nvidiactl").exists()
# Triton's attention and torch's operators: vLLM's compiled kernels need not be there.
PORTABLE = (
    {
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {"custom_ops": ["none"]},
    }
    if ON_GPU
    else {}
)
LMCACHE = ROOT / "benches" / "peers" / "envs" / "lmcache-vllm" / "bin" / "python"
WRONG = re.compile(r"^(?:\[rank\d+\]: )?(\w*Error: .*)$", re.MULTILINE)


def run(module, what, more):
    """Run a module in the engine's environment and return its figures."""
    here = PYTHON if PYTHON.exists() else sys.executable
    python = LMCACHE if what == "lmcache" else here
    command = [python, "-m", f"benches.engines.{module}", *more]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    report = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if report.returncode:
        text = report.stdout + report.stderr
        wrong = WRONG.findall(text) or [line for line in text.splitlines() if line.strip()]
        return {"what": what, "error": wrong[-1] if wrong else f"ended with {report.returncode}"}
    return json.loads(report.stdout.splitlines()[-1])


def found(figures):
    return median(took for took, _ in figures["found"])
