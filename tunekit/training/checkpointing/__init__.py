"""Checkpoints: written by all ranks, restored exactly, resumed in another layout."""
