"""Engines sample responses from the policy."""
