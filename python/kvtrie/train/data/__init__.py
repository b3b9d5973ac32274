"""Data for fine-tuning: sources of cases, and their batches.

Invariant: the same settings and seed give the same batches in the same order. Cost: tokenising each
case on first use.
"""

from kvtrie.train.data.batches import Batch, Case, collate, epoch
from kvtrie.train.data.json_lines import JsonLines
from kvtrie.train.data.longbench import LongBenchV2
from kvtrie.train.data.module import DataModule, Example, Split
from kvtrie.train.data.recall import Recall

__all__ = [
    "Batch",
    "Case",
    "DataModule",
    "Example",
    "JsonLines",
    "LongBenchV2",
    "Recall",
    "Split",
    "collate",
    "epoch",
]
