"""Garbage is collected seldom while a run is made ready, and as before behind it."""

import gc
import subprocess
import sys

import pytest

from tunekit.process.garbage import NUM_OBJECTS, collected_seldom


def test_garbage_is_collected_seldom_within_and_as_before_behind_it():
    usual = gc.get_threshold()
    with pytest.raises(KeyError), collected_seldom():
        assert gc.get_threshold() == (NUM_OBJECTS, *usual[1:])
        raise KeyError
    assert gc.get_threshold() == usual


def test_what_is_there_before_is_left_out_of_collections_within():
    code = """
import gc
from tunekit.process.garbage import set_aside
try:
    with set_aside():
        num = gc.get_freeze_count()
        assert num > 1000
        with set_aside():
            assert gc.get_freeze_count() == num
        assert gc.get_freeze_count() == num  # the outer one goes on
        cycle = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() == 1
        raise KeyError
except KeyError:
    assert gc.get_freeze_count() == 0
gc.freeze()
with set_aside():
    pass
assert gc.get_freeze_count()  # somebody else's
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_triton_reports_no_leaks():
    code = """
import atexit
from tunekit.process.garbage import leave_to_the_system
atexit.register(leave_to_the_system)
import triton
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_program_ends_with_what_it_has_written(tmp_path):
    """Functions at its end run, files in cycles are written, and its status is its own."""
    code = """
import atexit, sys
from tunekit.process.garbage import leave_to_the_system
atexit.register(leave_to_the_system)
atexit.register(print, "at exit")
class Holder: pass
def hold(path):
    holder = Holder()
    holder.own, holder.file = holder, open(path, "w")
    holder.file.write("written")
    return holder
kept = hold(sys.argv[1])
hold(sys.argv[2])
sys.exit(3)
"""
    files = tmp_path / "kept", tmp_path / "garbage"
    ended = subprocess.run([sys.executable, "-c", code, *files], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "at exit\n", "")
    assert [file.read_text() for file in files] == ["written", "written"]
