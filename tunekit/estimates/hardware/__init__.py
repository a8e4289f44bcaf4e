"""Accelerators and machines that are known by name."""
