"""Time of a training step: products, exchanges, useful time of a long run."""
