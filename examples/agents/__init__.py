"""Agents that call tools against a served model, and the tokens that the server finds."""
