"""The outputs of a run: folder and lock, plots, trackers; ``subscribers`` follow its steps."""
