"""The parts of a training step, and what surrounds the steps: evaluation, checkpoints, interrupts."""
