"""A differential fuzzer: random valid recipes, trained by tunekit and by a plain torch loop of its own.

`recipes` draws a recipe and its rows from one integer, `reference` computes what the run must be, `play` trains the
recipe with tunekit and compares. `python -m benchmarks.fuzz --help` tells the rest.
"""
