"""Adapters for other trainers. A module with a framework's name needs that framework."""
