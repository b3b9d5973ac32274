"""The goals of the table: how many times a peer of the same run must take what ours takes.

Most are the ratios recorded on 2026-11-24, less a tenth: a floor under the ratios of the record,
which holds on a slow machine as on a fast one. Those of `request` are for the default policy, which
may take 1.25 times as long as `retention`. The peers evict by LRU whatever policy ours plays.
Invariant: each name is a row of `benches.core.rows`. Cost: none.
"""

GOALS: dict[str, dict[str, float]] = {
    "request": {"SGLang Rust": 12, "SGLang Python": 27, "vLLM": 49, "request.retention": 0.8},
    "request.retention": {"SGLang Rust": 14.5, "SGLang Python": 32.8, "vLLM": 59.1},
    "request.lru": {"SGLang Rust": 25, "SGLang Python": 47.7, "vLLM": 86.2},
    "lookup.mean": {"SGLang Rust": 9.26, "SGLang Python": 29.1, "vLLM": 58, "vLLM, hashing": 201},
    "lookup.p99": {"SGLang Rust": 7.15, "SGLang Python": 29.3, "vLLM": 55.2, "vLLM, hashing": 164},
    "evict.lru": {"vLLM": 9.57, "SGLang Rust": 287, "SGLang Python": 18084},
    "evict.fifo": {"vLLM": 8.46, "SGLang Rust": 253, "SGLang Python": 15975},
    "evict.lfu": {"vLLM": 9.06, "SGLang Rust": 272, "SGLang Python": 17111},
    "evict.flat": {"vLLM": 8.18, "SGLang Rust": 245, "SGLang Python": 15449},
    "evict.retention": {"vLLM": 6.91, "SGLang Rust": 207, "SGLang Python": 13054},
    "decode": {"vLLM": 43.7},
    "store.16": {"Dynamo": 7.45},
    "store.100": {"Dynamo": 15.3},
    "find.miss": {"Dynamo": 27.6},
    "find.miss.int32": {"Dynamo": 25},
    "find.miss.int64": {"Dynamo": 20.4},
    "find.miss.list": {"Dynamo": 3.78},
    "find.10": {"Dynamo": 21.3},
    "find.10.int32": {"Dynamo": 19.8},
    "find.10.int64": {"Dynamo": 17.4},
    "find.10.list": {"Dynamo": 3.48},
    "find.100": {"Dynamo": 20.1},
    "find.100.int32": {"Dynamo": 18.3},
    "find.100.int64": {"Dynamo": 10.8},
    "find.100.list": {"Dynamo": 0.606},
    "find.1000": {"Dynamo": 5.71},
    "find.1000.int32": {"Dynamo": 4.83},
    "find.1000.int64": {"Dynamo": 3.17},
    "find.1000.list": {"Dynamo": 0.236},
    "memory.tiers_1": {"SGLang Rust": 4.03, "vLLM": 3.43, "Dynamo": 1.02},
    "memory.retention": {"SGLang Rust": 4.03, "vLLM": 3.43, "Dynamo": 1.02},
    "offload": {"vLLM LRU": 31.1, "vLLM ARC": 13.9},
}
