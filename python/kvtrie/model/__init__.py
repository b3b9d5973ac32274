"""A model's KV as the manager sees it: shapes, groups of layers, layouts of bytes, costs.

```text
shape --> layer_group, model_config        group_pages, group_layout --> layout        cost
```

Invariant: sizes follow from the shape alone. Importing this imports no torch.
"""
