"""Training: network, objectives, the loop, checkpoints."""
