"""Training: a loop, optimizers, distribution, checkpoints and logs."""
