"""Synthetic traces of requests to a prefix cache."""

from kvtrie.sim.workloads.conversations import conversations
from kvtrie.sim.workloads.families import FAMILIES, agents, chats, flood, shared

__all__ = ["FAMILIES", "agents", "chats", "conversations", "flood", "shared"]
