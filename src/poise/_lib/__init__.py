"""Helpers that every package may use: error messages, atomic files, the device, user code."""
