"""Adapters for other trainers. Each module needs the framework that it is named after."""
