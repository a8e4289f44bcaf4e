"""Formats of training rows, and the checks of each."""
