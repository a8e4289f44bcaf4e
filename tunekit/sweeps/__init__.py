"""Sweeps: many runs of one recipe with some values changed, stopped, resumed and compared as one."""
