"""The main job: a real model holds conversations whose KV does not fit, and says the same.

```text
run --> chats, turn --> model                 conversations, and what computes them
 +--> report, picture, chart --> residency    where the blocks were
fusing --> passages, fusion_picture, model    hybrid --> families    long_prompt --> model
```
"""
