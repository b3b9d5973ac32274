"""A model's KV for the manager: shapes, groups of layers, layouts of bytes, costs.

```text
shape --> layer_group, model_config        group_pages, group_layout --> layout        cost
```

Invariant: sizes depend only on the shape. This package does not import torch.
"""
