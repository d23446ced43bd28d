"""What a run leaves behind and shows: its folder, console, plots, trackers."""
