"""The states that a power loss may leave, from records of calls, and a run whose states are resumed."""

import random
import shutil

import pytest
from rich.console import Console

from benchmarks.power_loss import Record, measure


def hexed(text):
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def states_of(tmp_path, *calls):
    """The states after calls, each a name and its arguments: paths below the folder, and texts after `=`."""
    lines = []
    for name, *arguments in calls:
        paths = [hexed(f"{tmp_path}/{one}".rstrip("/")) for one in arguments if not one.startswith("=")]
        match name:
            case "create":
                lines.append(f'1 openat(AT_FDCWD<{hexed("/")}>, "{paths[0]}", O_WRONLY|O_CREAT, 0666) = 3<{paths[0]}>')
            case "write":
                text = arguments[1].removeprefix("=")
                lines.append(f'1 write(3<{paths[0]}>, "{hexed(text)}", {len(text)}) = {len(text)}')
            case "fsync":
                lines.append(f"1 fsync(3<{paths[0]}>) = 0")
            case _:
                named = ", ".join(f'"{path}"' for path in paths)
                lines.append(f"1 {name}({named}) = 0")
    record = Record("\n".join(lines), tmp_path)
    found = record.states(record.num_calls, random.Random(0))
    return {tuple(sorted(state.items(), key=lambda one: one[0])) for state in found}


WRITTEN = (("mkdir", "run"), ("create", "run/draft"), ("write", "run/draft", "=whole"))
NAMED = ("rename", "run/draft", "run/status")
FOLDERS = (("fsync", "run"), ("fsync", ""))


def test_a_file_that_took_its_name_unsynced_may_be_empty_zero_gone_or_whole(tmp_path):
    found = states_of(tmp_path, *WRITTEN, NAMED)
    run = ("run", None)
    assert {(), (run,), (run, ("run/draft", b"whole"))} <= found
    assert {(run, ("run/status", content)) for content in (b"whole", b"", bytes(5))} <= found


def test_what_was_synced_with_its_folders_is_there_in_every_state(tmp_path):
    found = states_of(tmp_path, *WRITTEN, ("fsync", "run/draft"), NAMED, *FOLDERS)
    assert found == {(("run", None), ("run/status", b"whole"))}
    without = states_of(tmp_path, *WRITTEN, ("fsync", "run/draft"), NAMED, FOLDERS[0])
    assert () in without, "the folder's own name was not synced"


def test_a_replaced_file_is_the_earlier_or_the_later_one_and_never_both(tmp_path):
    earlier = [*WRITTEN, ("fsync", "run/draft"), NAMED, *FOLDERS]
    later = [("create", "run/draft"), ("write", "run/draft", "=newer"), ("fsync", "run/draft"), NAMED]
    names = {tuple(dict(state).items()) for state in states_of(tmp_path, *earlier, *later)}
    contents = {dict(state)["run/status"] for state in names}
    assert contents == {b"whole", b"newer"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_run_is_resumed_from_what_a_power_loss_leaves_of_it():
    found = measure("single", 12, 1, Console())
    assert found["states"] > 200 and found["whole"] > 50 and found["resumed"] == 1
    assert [found[kind] for kind in ("stuck", "wrong", "lost", "other_weights")] == [[], [], [], []]
