"""Messages as vLLM and SGLang publish them, and a publisher of them on real sockets."""

import threading
from contextlib import contextmanager

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def stored(blocks, parent, size=2, **more):
    """A `BlockStored` of vLLM."""
    event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent}
    event |= {"token_ids": list(range(size * len(blocks))), "block_size": size, "lora_id": None}
    return event | {"medium": "GPU", "lora_name": None, "group_idx": 0} | more


def pages(blocks, parent, size=2, **more):
    """The `BlockStored`s of SGLang: one per page."""
    parents = [parent, *blocks]
    return [
        {
            "type": "BlockStored",
            "block_hashes": [block],
            "parent_block_hash": before,
            "token_ids": list(range(size)),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            **more,
        }
        for block, before in zip(blocks, parents, strict=False)
    ]


def removed(blocks, **more):
    """A `BlockRemoved` of either."""
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU"} | more


def message(number, at, events, rank=0, topic=b""):
    """The frames of a batch."""
    return [topic, number.to_bytes(8, "big"), msgspec.msgpack.encode([at, events, rank])]


@contextmanager
def publishing(tmp_path, history):
    """Endpoints of a stream and of its history, and the stream's socket.

    The history is answered by a thread, as by the engines' publishers. The socket receives the
    subscription of a listener, from which on the listener gets all that is sent.
    """
    context = zmq.Context()
    stream, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    stream.bind(endpoints[0])
    router.bind(endpoints[1])
    stopped = threading.Event()

    def serve():
        while not stopped.is_set():
            if not router.poll(10):
                continue
            client, _, first = router.recv_multipart()
            for frames in list(history):
                if int.from_bytes(frames[1], "big") >= int.from_bytes(first, "big"):
                    router.send_multipart([client, b"", *frames])
            router.send_multipart([client, b"", b"", END, b""])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield (*endpoints, stream)
    finally:
        stopped.set()
        thread.join()
        stream.close(linger=0)
        router.close(linger=0)
        context.term()
