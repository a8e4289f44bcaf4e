"""Bytes that a plan needs: weights, states, activations, shards, and files on disk."""
