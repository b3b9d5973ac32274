"""Settings of a user: tiers, scopes, hints, resume points, sizes, and checks of arguments.

```text
tier, hint, resume, scope --> sizes, machine --> argument
```

Invariant: an invalid setting is refused where it is made. Importing this imports no torch.
"""
