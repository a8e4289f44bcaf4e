"""Configurations of other tools -> recipes, with a report of every key: a file per tool, and what they share."""
