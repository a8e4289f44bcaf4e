"""Scores of a model on held-out rows, generated answers and tasks."""
