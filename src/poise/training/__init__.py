"""The parts of a training step, and evaluation, checkpoints and interrupts around it."""
