"""Decide how to run a recipe on a machine: facts in, a plan with reasons out. Pure functions; imports no torch.

Bytes and seconds come from `tunekit.estimates`. The package is not called `plan` because `tunekit.plan` is the
function that users call.
"""
