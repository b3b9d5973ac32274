"""vLLM's `OffloadingConnector` on a CPU: its own manager, plain copies in place of its kernels.

A copy is done when it is submitted, which is the least that a copy can take here.
"""

# ruff: noqa: D102 - vLLM says what its methods do

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PlainOffloadingSpec(CPUOffloadingSpec):
    """Host memory, filled by plain copies."""

    def get_worker(self, kv_caches):
        return PlainWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)


class PlainWorker(OffloadingWorker):
    """Copies that have ended when they are submitted."""

    def __init__(self, kv_caches, chunks, blocks_per_chunk):
        assert blocks_per_chunk == 1
        self.device_pages = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self.host_pages = [
            torch.zeros(chunks, each.shape[1], dtype=torch.int8) for each in self.device_pages
        ]
        self.done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        self._copy(self.device_pages, src_spec, self.host_pages, dst_spec)
        return self._end(job_id)

    def submit_load(self, job_id, src_spec, dst_spec):
        self._copy(self.host_pages, src_spec, self.device_pages, dst_spec)
        return self._end(job_id)

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def _copy(self, source, of, target, to):
        rows, places = (torch.as_tensor(np.asarray(one.block_ids)) for one in (of, to))
        for one, other in zip(source, target, strict=True):
            other[places] = one[rows]

    def _end(self, job_id):
        self.done.append(TransferResult(job_id, success=True))
        return True
