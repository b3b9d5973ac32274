"""Settings of a user: tiers, scopes, hints, resume points, sizes, and how arguments are read.

```text
tier, hint, resume, scope --> sizes, machine --> argument
```

Invariant: a setting that cannot be is refused where it is made. Importing this imports no torch.
"""
