"""A run's outputs: its folder and lock, the console, plots, trackers; ``subscribers`` follow its steps."""
