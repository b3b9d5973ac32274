"""Fine-tuning on long contexts with the cache's policy in place.

```text
run --> lora, head, optimisers
finetune --> steps --> data         a run: batches, evaluation, snapshots
   +--> gradients --> cells --> cell         the backward pass, cell by cell
   |        +--> window_cell, checkpoint, spill, host_pool, residence
   +--> evaluate, metrics, saved --> files, snapshots
plan: memory and time before a run
```

A model is trained with the policy used in inference: the forward phase is inference by steps, and
the backward pass by cells replays its decisions.
Invariant: gradients equal plain autograd with the same decisions. Cost: memory grows with the
cache, not with the sequence.
"""

from kvtrie.train.data import DataModule, Example, JsonLines, LongBenchV2, Recall
from kvtrie.train.evaluate import Measured, evaluate
from kvtrie.train.finetune import Tuned, finetune
from kvtrie.train.gradients import LongContextGradients
from kvtrie.train.head import IGNORED, HeadModel, make_head
from kvtrie.train.lora import LoraSettings
from kvtrie.train.optimisers import OptimizerSettings
from kvtrie.train.run import EvalSettings, Run, TrainSettings
from kvtrie.train.settings import GradientSettings

__all__ = [
    "IGNORED",
    "DataModule",
    "EvalSettings",
    "Example",
    "GradientSettings",
    "HeadModel",
    "JsonLines",
    "LongBenchV2",
    "LongContextGradients",
    "LoraSettings",
    "Measured",
    "OptimizerSettings",
    "Recall",
    "Run",
    "TrainSettings",
    "Tuned",
    "evaluate",
    "finetune",
    "make_head",
]
