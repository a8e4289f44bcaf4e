"""Rewards: what judges the answers of a model while it learns from them.

Each kind has a file of its own. `load` makes of a recipe's list what TRL calls; `rows` looks before training whether
the rows have what each reward reads in them.
"""
