"""The main job: a real model holds conversations whose KV does not fit, and says the same."""
