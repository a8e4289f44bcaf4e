"""Garbage collection while modules are imported, a model is built and trained, and a program ends."""

import gc
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NUM_OBJECTS = 100_000
"""Container objects between two collections. With Python's 700, imports spend a fifth of their time on looking through
objects that stay."""

_WRITERS = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}


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


@contextmanager
def set_aside() -> Iterator[None]:
    """Leave out of collections within what is there before, which is modules and the model for the most part.

    Accelerate collects garbage before training and wherever it frees memory.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def leave_to_the_system() -> None:
    """Let the end of this program collect nothing: the system takes its memory back.

    Python looks through all objects several times while it ends, which takes seconds with torch and transformers. What
    was written to files that are still open goes to the disk first. With Triton all is collected as ever: its bindings
    (nanobind) list what is left at the end as leaked.
    """
    if "triton._C.libtriton" in sys.modules:
        return
    for item in gc.get_objects():
        # Not isinstance, which asks proxies for their class.
        if type(item) in _WRITERS and not item.closed:
            with suppress(OSError, ValueError):
                item.flush()
    gc.freeze()
