"""Checkpoints of a run: which are complete, how they are listed, and how one is named."""
