"""On which machines a run is gone on with."""

from types import SimpleNamespace

import pytest

from tests.training.folders import made_run
from tunekit.api import resume
from tunekit.errors import PlanError


def test_a_run_of_two_nodes_goes_on_where_they_are_named_and_not_on_this_machine_alone(tmp_path, monkeypatch):
    run = made_run(tmp_path / "run", phase="interrupted")
    plan = run.plan.model_copy(update={"num_nodes": 2})
    monkeypatch.setattr(resume, "decide", lambda *given, **how: SimpleNamespace(plan=plan))
    with pytest.raises(PlanError, match="run was planned for 2 nodes") as refused:
        resume.resumed(run)
    assert refused.value.hint == "pass them with --nodes HOST,HOST"
