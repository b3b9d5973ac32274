"""Order of vLLM's stream and kvtrie's two, and the share of copies that computation hides.

    python -m benches.gpu.vllm_streams

A request finds 2,000 tokens in host memory and computes 1,000, while torch's profiler writes down
when the device ran each kernel and copy. Loads of a layer have to end before its attention begins,
and stores of a layer to begin after its attention.
Cost: one start of vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

FOUND, FRESH = 2000, 1000  # tokens
ATTENTION = "attention"  # in the name of vLLM's Triton kernel
DEVICE = {"kernel", "gpu_memcpy"}  # categories of the profiler's events


@dataclass(frozen=True, slots=True)
class Streams:
    """Copies of one step, compared with its computation.

    Attributes:
        streams: distinct streams of computation, loads and stores.
        late: layers with attention before the end of their loads.
        early: layers with stores before the end of their attention.
        hidden: share of the copies' time in which the computation's stream was busy.
    """

    streams: int
    late: int
    early: int
    hidden: float


def streams_of(events, layers):
    """Read the device's events of one step.

    Args:
        events: `traceEvents` of a Chrome trace of torch's profiler.
        layers: layers of the model, whose loads and stores are equally many pieces each.

    Raises:
        ValueError: without loads, stores and one attention per layer.
    """
    by_stream = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE:
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            by_stream[event["args"]["stream"]].append(span)
    compute = max(
        by_stream,
        key=lambda stream: sum(ATTENTION in span[2] for span in by_stream[stream]),
        default=None,
    )
    busy = sorted(by_stream.pop(compute, []))
    attention = [span for span in busy if ATTENTION in span[2]][:layers]
    copies = sorted((sorted(spans) for spans in by_stream.values()), key=lambda spans: spans[0])
    counts = [len(spans) for spans in copies]
    if len(copies) != 2 or len(attention) < layers or any(count % layers for count in counts):
        raise ValueError(
            f"{len(attention)} attentions of {layers} layers, and copies per stream {counts}: "
            "a load stream and a store stream with equal pieces per layer are wanted"
        )
    loads, stores = (pieces(spans, layers) for spans in copies)
    late = sum(end > begin for (_, end), (begin, *_) in zip(loads, attention, strict=True))
    early = sum(begin < end for (begin, _), (_, end, _) in zip(stores, attention, strict=True))
    spans = [span for each in copies for span in each]
    whole = sum(end - begin for begin, end, _ in spans)
    hidden = sum(
        max(0, min(end, until) - max(begin, since))
        for begin, end, _ in spans
        for since, until, _ in busy
    )
    return Streams(1 + len(copies), late, early, hidden / whole)


def pieces(spans, layers):
    """Begin and end of the copies of each layer."""
    each = len(spans) // layers
    parts = [spans[at * each : (at + 1) * each] for at in range(layers)]
    return [(part[0][0], max(end for _, end, _ in part)) for part in parts]


def measured(model):
    """Profile one request that finds most of its prompt in host memory."""
    from torch.profiler import ProfilerActivity, profile

    from benches.engines.vllm_first_token import Timed

    settings = {"what": "kvtrie", "model": model, "dtype": "bfloat16", "tokens": FOUND + FRESH}
    settings |= {"rounds": 2, "disk": "", "host": None, "groups": 1, "states": False}
    timed = Timed(argparse.Namespace(**settings))
    timed.ask(1)
    timed.end_stores("")
    timed.ask(2, FOUND)
    timed.end_stores("")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        _, found, _ = timed.ask(2)
        timed.end_stores("")
    if not found:
        raise ValueError(f"{found} of {FOUND} tokens were found")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    layers = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    return streams_of(events, layers)


def main():
    from rich.console import Console

    from benches.engines.__main__ import smollm_folder

    streams = measured(smollm_folder(Console(stderr=True)))
    sys.stdout.write(json.dumps(asdict(streams)) + "\n")
    return 0 if streams.late == streams.early == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
