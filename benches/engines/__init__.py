"""What kvtrie gains a server: time to the first token of prompts whose KV is on host or on disk.

`__main__` starts one process per kind of server in the engine's own environment
(`vllm_first_token`) and compares what they print. Peers: no connector, and vLLM's
OffloadingConnector with its own manager and plain copies (`plain_offload`): it has no others for
CPUs.
"""
