"""Advice about tiers: requests rebuilt from an engine's KV events and played through the core."""
