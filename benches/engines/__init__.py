"""Time to the first token of servers with kvtrie, and time of the scheduler's calls.

`__main__` starts one process per kind of server in the engine's own environment
(`vllm_first_token`, `vllm_scheduler_step`) and compares what they print. Peers: no connector, and
vLLM's OffloadingConnector with its own manager and plain copies (`plain_offload`): it has no others
for CPUs.
"""
