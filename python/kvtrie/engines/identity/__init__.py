"""Names of stored KV: digests of a model's whole computation.

```text
fingerprint --> code, model_state --> model_fields        of a model of transformers
module_state, start_options --> canonical --> weights     of a server
```

Invariant: models with possibly different KV have different names.
"""
