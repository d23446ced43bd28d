"""Token regulators for reinforcement learning with verifiable rewards."""
