"""Servers with other models, or with other connectors in addition, answer as without us."""

from __future__ import annotations

import servers
from servers import BLOCK, prompt, same, serve

PROMPTS = [prompt(seed, 200) for seed in range(3)]
HOST = {"tiers": [{"kind": "host", "blocks": 64}]}


def test_among_several_connectors(tmp_path):
    model = servers.tiny_llama(tmp_path)
    offloading = {
        "spec_name": "KvtrieOffloadingSpec",
        "spec_module_path": "kvtrie.engines.vllm.offloading",
        "cpu_bytes_to_use": 1 << 24,
    }
    both = [("KvtrieConnector", HOST), ("OffloadingConnector", offloading)]
    for order in (both, both[::-1]):
        connectors = [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
            for name, extra in order
        ]
        with serve(model) as server:
            wanted = server.answers(PROMPTS)
        with serve(model, {"connectors": connectors}, connector="MultiConnector") as server:
            every = server.core.scheduler.connector._connectors
            (ours,) = [each for each in every if type(each).__name__ == "KvtrieConnector"]
            same(server.answers(PROMPTS), wanted)
            for _ in range(50):  # stores to host in flight
                server.llm.llm_engine.step()
            server.forget()
            same(server.answers(PROMPTS), wanted)
            assert server.found >= 3 * 6 * BLOCK
            first = order[0][0] == "KvtrieConnector"
            assert ours.scheduler.cache.counters.tokens["host"] == (3 * 6 * BLOCK if first else 0)
            for _ in range(50):
                server.llm.llm_engine.step()
            stats = ours.scheduler.manager.stats()
            assert (stats.leases, stats.moves) == (0, 0)
            ours.scheduler.manager.audit()
