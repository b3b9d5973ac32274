"""A vLLM server on a GPU, with kvtrie and without, in at most nine minutes, with one report.

    benches/gpu/run_vllm.sh FOLDER

Rows are programs of their own, like those of `benches.gpu.check`, whose report and resuming they
share. Results go to `target/gpu-vllm.jsonl`, the report to `target/gpu-vllm.json` and `.md`.
"""

from __future__ import annotations

import sys

from benches.gpu.check import Row, main

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.worker.gpu_worker",
    "kvtrie.engines.vllm.connector",
)
MEASURED = ("-m", "benches.gpu.vllm_times")

ROWS = (
    Row("imports", ("-c", f"import {', '.join(MODULES)}"), 90),
    Row("answers with kvtrie and without", (*MEASURED, "--only", "answers"), 150),
    Row("first tokens", (*MEASURED, "--only", "first-token"), 240),
    Row("order of streams and hidden copies", ("-m", "benches.gpu.vllm_streams"), 90),
)

if __name__ == "__main__":
    sys.exit(main(rows=ROWS, name="gpu-vllm"))
