"""Decisions of a plan, each a function that returns its reason."""
