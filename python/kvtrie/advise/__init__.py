"""Advice about tiers: requests rebuilt from an engine's KV events, played through the core."""
