"""Helpers that every package may use: errors, files, transfers to the device, user code."""
