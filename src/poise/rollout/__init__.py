"""What is asked of an engine, and what comes back: types, and random numbers."""
