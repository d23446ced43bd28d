"""The modules of a training step; also evaluation, checkpoints and interrupts."""
