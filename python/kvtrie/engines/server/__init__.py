"""Parts shared by all servers: the start-up line, request hints, control, causes of misses.

```text
control --> commands --> request_hints        why --> miss_report, top_breakers
control_client   client_fields   pauses   startup   boundary   format_figure   show_text
```

Nothing here imports an engine.
"""
