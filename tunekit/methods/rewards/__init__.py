"""Rewards: what judges the answers of a model while it learns from them.

Those that read an answer's text alone share `text`; each other kind has a file of its own. `load` makes of a recipe's
list what TRL calls, and looks before training whether the rows have what each reward reads in them.
"""
