"""Why a run failed, as it is told afterwards: real failures of real runs."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from tests.commands import run_command
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made
from tests.training.faulty import Fault, Forked, faulty
from tests.training.folders import made_run
from tests.waiting import until
from tunekit import frontend
from tunekit.api import verbs
from tunekit.errors import DataError, MemoryShortError, NonFiniteError, RunError, StandstillError
from tunekit.launching.local import supervise
from tunekit.runs.record import Record, not_saved
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place
from tunekit.training.worker import work


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis")
    save_tiny_model(folder / "model", hidden=32, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20)))
    return folder


def recipe_for(folder, name, *, data=None, parallel=None, **train):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, **(data or {})},
        "adapter": "lora",
        "train": {"max_steps": 6, "global_batch_size": 4, "micro_batch_size": 2, "save_steps": 2, **train},
        "parallel": parallel or {},
        "output": {"sample_prompts": [], "dir": str(folder / name)},
    }


def shown(run):
    answer = run_command("runs", "show", run.path)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_memory_that_ran_out_is_told_with_the_plan_beside_the_truth(folder):
    run = Run(made(recipe_for(folder, "memory")))
    with faulty(Fault("memory", 4)), pytest.raises(MemoryShortError):
        work(run)
    found = frontend.diagnose_run(run)
    assert (found.cause, found.rank) == ("memory", 0)
    assert found.what.startswith("step 4: ") and "is out of memory: 2.00 GiB requested" in found.what
    assert "planned" in found.hint and "measured" in found.hint
    # So much more than was planned that nothing smaller would do, and the same would end in the same way.
    assert found.changes == () and not found.can_go_on


@pytest.mark.slow
def test_a_change_that_mends_memory_goes_on_from_the_checkpoint(folder):
    run = verbs.train(recipe_for(folder, "mended", max_steps=4))
    run.update_status(phase="failed")
    changes = ["train.micro_batch_size=1"]
    Record(run, Place()).write_error(MemoryShortError("step 5: CPU is out of memory", hint="less", changes=changes))
    found = frontend.diagnose_run(run)
    assert (found.changes, found.can_go_on) == (("train.micro_batch_size=1",), True)
    words = " ".join(shown(run).split())
    assert f"try: tunekit resume {run.path} train.micro_batch_size=1" in words
    verbs.resume(run, [*found.changes, "train.max_steps=6"])
    assert run.state == "finished" and frontend.diagnose_run(run) is None


def test_a_loss_that_is_no_number_is_told_with_a_lower_learning_rate_for_a_new_run(folder):
    recipe = recipe_for(folder, "nan", learning_rate=1e-3)
    run = Run(made(recipe))
    with faulty(Fault("loss", 3)), pytest.raises(NonFiniteError):
        work(run)
    found = frontend.diagnose_run(run)
    assert (found.cause, found.changes) == ("non_finite", ("train.learning_rate=0.0001",))
    assert found.what.startswith("step 3: the loss is nan, for ")
    # The checkpoint's schedule has its own learning rate.
    assert not found.can_go_on
    words = " ".join(shown(run).split())
    assert "output.dir=null train.learning_rate=0.0001" in words
    again = verbs.train({**recipe, "output": {"sample_prompts": [], "dir": str(folder / "calm")}}, found.changes)
    assert again.recipe.train.learning_rate == 1e-4 and again.state == "finished"


def test_a_learning_rate_without_measure_makes_losses_no_numbers(folder):
    recipe = recipe_for(folder, "wild", learning_rate=1e30, max_grad_norm=1e30, lr_scheduler_type="constant")
    with pytest.raises(NonFiniteError):
        verbs.train(recipe)
    found = frontend.diagnose_run(Run(folder / "wild"))
    assert (found.cause, found.changes) == ("non_finite", ("train.learning_rate=0.0002",))


def test_bad_rows_of_a_stream_are_told_with_the_file_and_the_line(folder, tmp_path):
    rows = (folder / "rows.jsonl").read_text().splitlines()
    # Beyond the rows that are looked at before a run begins.
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:1] * 1000, '{"nothing": 1}', *rows]))
    data = {"train": str(tmp_path / "rows.jsonl"), "streaming": True}
    run = Run(made(recipe_for(folder, "rows", data=data, max_steps=300)))
    with pytest.raises(DataError):
        work(run)
    found = frontend.diagnose_run(run)
    assert found.cause == "rows" and "rows.jsonl:1001" in found.what
    assert found.trace is None and not found.can_go_on


def test_an_exception_that_nobody_thought_of_keeps_its_traceback(folder):
    run = Run(made(recipe_for(folder, "crash")))
    with faulty(Fault("crash", 2)), pytest.raises(RuntimeError):
        work(run)
    found = frontend.diagnose_run(run)
    assert (found.cause, found.what, found.hint, found.changes) == ("defect", "RuntimeError: it fails here", None, ())
    assert "in compute_loss" in found.trace and "Traceback" in found.log


@pytest.mark.slow
def test_the_rank_that_failed_first_is_named_and_not_the_one_that_waited_for_it(folder):
    run = Run(made(recipe_for(folder, "ranks", parallel={"num_processes": 2})))
    with pytest.raises(RuntimeError):
        supervise(run, lambda: Forked(run.path, 2, (Fault("crash", 3, rank=1),)), None)
    found = frontend.diagnose_run(run)
    assert (found.cause, found.rank, found.what) == ("defect", 1, "RuntimeError: it fails here")
    assert found.can_go_on


@pytest.mark.slow
def test_a_killed_process_is_told_as_such_and_the_run_can_go_on_once_it_has_a_checkpoint(folder):
    recipe = recipe_for(folder, "killed", max_steps=100_000)
    code = f"import tunekit; tunekit.train({recipe!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as process:
        checkpoints = folder / "killed" / "checkpoints"

        def has_one():
            assert process.poll() is None
            return list(checkpoints.glob("checkpoint-*"))

        until(has_one)
        process.send_signal(signal.SIGKILL)
    run = Run(folder / "killed")
    found = frontend.diagnose_run(run)
    assert (found.cause, found.rank, found.changes, found.can_go_on) == ("killed", None, (), True)
    assert f"process {process.pid} on {os.uname().nodename} exited without an error" in found.what
    assert "exited without an error" in " ".join(shown(run).split())


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StandstillError("rank 1 stood still for 60 s", hint="see the stacks"), "hung"),
        (RunError("something else"), "other"),
        (ModuleNotFoundError("No module named 'flash_attn'"), "package"),
    ],
)
def test_errors_say_of_themselves_what_they_come_down_to(tmp_path, error, cause):
    run = made_run(tmp_path / "run", phase="failed")
    Record(run, Place(rank=1, num_processes=2)).write_error(error)
    (run.path / "stacks").mkdir()
    (run.path / "stacks" / "rank-1.txt").write_text("File a.py, line 3 in wait")
    found = frontend.diagnose_run(run)
    assert (found.cause, found.rank) == (cause, 1)
    assert "rank-1:\nFile a.py, line 3 in wait" in found.trace or cause == "package"


def test_a_full_disk_is_told_as_such(tmp_path):
    run = made_run(tmp_path / "run", phase="failed")
    Record(run, Place()).write_error(not_saved(run, "the checkpoint of step 2", os.strerror(errno.ENOSPC), 10**15))
    found = frontend.diagnose_run(run)
    assert found.cause == "disk" and "No space left on device" in found.what


@pytest.mark.parametrize("phase", ["finished", "interrupted", "training", "queued"])
def test_a_run_that_is_well_or_was_stopped_has_no_diagnosis(tmp_path, phase):
    assert frontend.diagnose_run(made_run(tmp_path / "run", phase=phase)) is None
