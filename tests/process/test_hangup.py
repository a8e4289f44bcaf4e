"""SIGHUP comes when a terminal or an ssh connection is closed: it asks a run to end, but for one under nohup."""

import os
import signal

import pytest

from tests.training.folders import made_run
from tunekit.process.signals import Wishes
from tunekit.runs.small_files import EXIT_CODES


@pytest.fixture
def handler(request):
    """What the process does with the signal when the run begins."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("handler", [signal.SIG_DFL], indirect=True)
def test_a_hangup_is_a_wish_for_the_end_of_the_step_however_often_it_comes(handler, tmp_path):
    wishes = Wishes(made_run(tmp_path / "run", phase="training"), 30.0)
    with wishes, wishes.waiting():
        # By the kernel to what is in the foreground, and by the shell to all that it has started.
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert wishes.asked is not None and not wishes.now
        assert (wishes.asked.by, wishes.asked.grace_seconds) == ("SIGHUP", None)
        assert wishes.asked.exit_code == EXIT_CODES["SIGHUP"] == 128 + signal.SIGHUP
    with Wishes(made_run(tmp_path / "loads", phase="loading"), 30.0), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN], indirect=True)
def test_a_hangup_is_no_wish_where_the_process_was_started_to_ignore_it(handler, tmp_path):
    wishes = Wishes(made_run(tmp_path / "run", phase="training"), 30.0)
    with wishes, wishes.waiting():
        os.kill(os.getpid(), signal.SIGHUP)
        assert wishes.asked is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
