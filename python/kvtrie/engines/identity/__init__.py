"""Names of stored KV: digests of all that a model computes with.

```text
fingerprint --> code, model_state --> model_fields        of a model of transformers
module_state, start_options --> canonical --> weights     of a server
```

Invariant: two models that may compute different KV have different names.
"""
