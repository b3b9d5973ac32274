"""Fine-tuning on long contexts with the cache's policy in place.

A model learns under the decisions that it will run with: inference by steps, then a backward pass
by cells that plays them again.
Invariant: gradients are those of plain autograd under the same decisions. Cost: memory follows the
cache, not the sequence.
"""

from kvtrie.train.gradients import LongContextGradients
from kvtrie.train.head import IGNORED, HeadModel, make_head
from kvtrie.train.settings import GradientSettings

__all__ = [
    "IGNORED",
    "GradientSettings",
    "HeadModel",
    "LongContextGradients",
    "make_head",
]
