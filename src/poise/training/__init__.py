"""The parts of a training step, and evaluation, checkpoints, records and interrupts around it."""
