"""Clients that serve real models: a folder per engine, imported only where it is used.

```text
transformers   vllm   sglang     one engine each; none imports another
      |          |      |
      +----> server <---+        what an operator sees: start-up, hints, control, why
      |          |      |
      +---> identity <--+        what stored KV is named by: weights, code, options
```
"""
