"""Garbage is collected seldom while a run is made ready, and as before behind it."""

import gc

import pytest

from tunekit.process.garbage import NUM_OBJECTS, collected_seldom


def test_garbage_is_collected_seldom_within_and_as_before_behind_it():
    usual = gc.get_threshold()
    with pytest.raises(KeyError), collected_seldom():
        assert gc.get_threshold() == (NUM_OBJECTS, *usual[1:])
        raise KeyError
    assert gc.get_threshold() == usual
