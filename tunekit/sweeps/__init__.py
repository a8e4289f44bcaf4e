"""Sweeps: many runs of one recipe with some values changed, stopped, gone on with and looked at as one."""
