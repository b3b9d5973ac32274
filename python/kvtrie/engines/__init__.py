"""Clients for serving real models: a folder per engine, imported only on use.

```text
transformers   vllm   sglang     a folder per engine, without imports between them
      |          |      |
      +----> server <---+        the operator's interface: start-up, hints, control, why
      |          |      |
      +---> identity <--+        the name of stored KV: weights, code, options
```
"""
