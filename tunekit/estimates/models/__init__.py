"""Shapes of a model from its config.json alone."""
