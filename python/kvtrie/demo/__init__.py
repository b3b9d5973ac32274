"""The main job: a real model answers conversations in too little memory, with the same answers.

```text
run --> chats, turn --> model                 conversations, and their computation
 +--> report, picture, chart --> residency    residency of the blocks
fusing --> passages, fusion_picture, model    hybrid --> families    long_prompt --> model
```
"""
