"""Garbage collection while modules are imported and a model is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NUM_OBJECTS = 100_000
"""Container objects between two collections. With Python's 700, imports spend a fifth of their time on looking through
objects that stay."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage seldom within, and as before behind it.

    Not for training: tensors in cycles would stay on the device for many steps.
    """
    usual = gc.get_threshold()
    gc.set_threshold(NUM_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
