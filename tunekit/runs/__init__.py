"""The run folder: its files, checkpoints, events and lineage. It knows no training."""
