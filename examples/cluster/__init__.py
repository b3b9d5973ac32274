"""Three engines, their events, Dynamo's index and selection services, and chats over HTTP.

    __main__ --> play, picture        what is shown: round-robin, the index, the selection service
    play --> processes, routers       chats of several clients, one engine killed on the way
    processes --> engine --> kv       a process per engine and service, which can be killed

Read `routers.py` first: it has every call of `kvtrie.cluster`. `engine.py` is an engine over
kvtrie's manager whose computation is simulated: KV bytes are a function of the tokens, and every
block that a request finds is compared.

    python -m examples.cluster
"""
