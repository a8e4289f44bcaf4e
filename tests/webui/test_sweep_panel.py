"""Sweeps from a draft: what is refused, and that the rest becomes the sweep that the command line would make."""

import pytest

from tests.waiting import until
from tunekit.errors import TunekitError
from webui.listing import Listing
from webui.runs_table import found
from webui.site import Site
from webui.sweep_panel import begun

DRAFT = """\
model: pico
data: {train: chats.jsonl, max_length: 64}
adapter: lora
train: {max_steps: 1, global_batch_size: 2}
output: {name: swept, sample_prompts: []}
"""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([], "no values to try"),
        (["data.train.path=chats.jsonl,/etc/passwd"], "not a number or a choice"),
        (["output.name=a,b"], "not a number or a choice"),
        (["train.learning_rat=1,2"], "no such field"),
        (["model.trust_remote_code=true,false"], "trust_remote_code"),
        (["adapter.rank=8,-1"], "adapter.rank"),
        (["adapter.rank=8"], "nothing to try|no values|one value|several values"),
    ],
)
def test_what_a_page_does_not_try_is_refused(workspace, monkeypatch, values, problem):
    monkeypatch.chdir(workspace)
    with pytest.raises(TunekitError, match=problem):
        begun(Site(workspace), DRAFT, values, "grid", 0)
    assert not (workspace / "sweeps").exists() and not (workspace / "runs").exists()


@pytest.mark.slow
def test_a_sweep_is_started_and_its_runs_are_found_by_its_tag(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    sweep = begun(Site(workspace), DRAFT, ["train.learning_rate=1e-5..1e-3", "adapter.rank=4,8"], "random", 2)
    assert sweep.spec.search == "random" and sweep.spec.num_runs == 2
    until(lambda: {outcome.state for outcome in sweep.outcomes()} == {"finished"})
    listing = Listing(workspace / "runs")
    lines = found(listing.lines(), "", (), [sweep.tag])
    assert len(lines) == 2 and {"train.learning_rate"} <= set(listing.fields(lines)[lines[0].name])
