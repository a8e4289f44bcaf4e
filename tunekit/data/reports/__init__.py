"""Statistics and previews of data before training."""
