"""Adapters for other trainers. Each module needs the framework in its name."""
