"""Engines: they sample responses from the policy."""
