"""Memory of an engine and of a host tier, and the moves of four blocks between them."""

import numpy as np
import torch
from tests.engines.vllm_engine import BLOCKS, SIZE

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import EnginePool, Pool

LAYERS = 5


class StepRig:
    """Two pools on a device and on the host, with stores out of slots 1 to 4 and loads into 5 to 8.

    Attributes:
        tensors: the engine's memory, `(blocks, 2, tokens, heads, dim)` per layer.
        stores: moves of the four blocks to the host.
        loads: moves of the same blocks back into other slots.
    """

    def __init__(self, device="cpu"):
        shape = ModelShape(layers=LAYERS, kv_heads=1, head_dim=4)
        self.tensors = [torch.zeros(BLOCKS, 2, SIZE, 1, 4, device=device) for _ in range(LAYERS)]
        self.gpu = EnginePool(shape, SIZE, self.tensors, opaque="naive")
        pinned = device != "cpu"
        self.host = Pool(shape, BLOCKS, SIZE, layout=self.gpu.layout, pinned=pinned)
        tiers = [
            Tier("gpu", blocks=BLOCKS, owner="engine", write="through"),
            Tier("host", blocks=BLOCKS),
        ]
        manager, prompt = BlockManager(shape, tiers, block_tokens=SIZE), np.arange(4 * SIZE)
        lease = manager.acquire(prompt, now=0)
        lease.bind(0, [1, 2, 3, 4])
        lease.store_ahead((0, 4), now=0)
        self.stores = manager.moves()
        manager.complete(self.stores.id, now=0)
        lease.commit(prompt, now=0)
        lease.release(now=0)
        lease = manager.acquire(prompt, now=0, keep=0, load="none")
        lease.bind(0, [5, 6, 7, 8])
        lease.load(blocks=(0, 4), now=0)
        self.loads = manager.moves()
