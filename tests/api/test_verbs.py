"""Promises of the verbs that hold between processes."""

import pytest

from tests.training.folders import made_run
from tunekit.api import verbs
from tunekit.errors import RunError
from tunekit.runs.record import claimed
from tunekit.runs.run import Run


class Watched(Run):
    """A run that another process tries to have at the moment when it says that it begins."""

    def begin(self):
        with pytest.raises(RunError, match="another process is resuming or deleting"), claimed(self):
            pass
        super().begin()


def test_who_goes_on_with_a_run_keeps_others_off_until_it_has_said_so(tmp_path):
    run = Watched(made_run(tmp_path / "run", phase="failed").path)
    verbs._going_on(run, recipe=run.recipe)
    assert run.is_begun
    with claimed(run):
        pass
