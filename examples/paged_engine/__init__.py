"""A small paged engine that owns its slots: the guide for authors of engines.

Read `scheduler.py` first, then `pending.py`: they make every call into kvtrie, over the memory in
`slots.py`. The rest is what any engine has: `worker.py` and `ranks.py` are the processes that hold
the bytes, `model.py` is a sharded Llama over block tables. `chats.py` gives them work and compares
every token.

    python -m examples.paged_engine
"""
