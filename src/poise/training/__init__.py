"""The parts of a training step; also evaluation, checkpoints and interrupts."""
