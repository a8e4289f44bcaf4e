"""Drafts from a browser name what is in the workspace, on the hub or on another machine: no other file of this one."""

import pytest

import tunekit
from webui.reach import check_edits, check_machine, check_reach
from webui.site import Site


def recipe(**sections):
    return tunekit.load_recipe({"model": "pico", "data": {"train": "chats.jsonl"}, **sections})


@pytest.fixture
def site(workspace):
    outside = workspace.parent / "outside"
    outside.mkdir()
    (outside / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (workspace / "folder").mkdir()
    (workspace / "folder" / "leads.jsonl").symlink_to(outside / "rows.jsonl")
    (workspace / "link").symlink_to(outside)
    return Site(root=workspace)


@pytest.mark.parametrize(
    "train",
    ["chats.jsonl", "*.jsonl", "example:pirate", "Org/dataset", "https://host/rows.jsonl", "s3://bucket/*.jsonl"],
)
def test_what_is_in_the_workspace_or_elsewhere_can_be_named(site, train):
    check_reach(site, recipe(data={"train": train}, output={"dir": "runs/mine"}))


@pytest.mark.parametrize(
    "train",
    [
        "/etc/passwd",
        "../outside/rows.jsonl",
        "../outside/*.jsonl",
        "link/rows.jsonl",
        "link/*",
        "folder",
        "folder/*.jsonl",
        "~/rows.jsonl",
        "~root/rows.jsonl",
        "file:///etc/passwd",
        "local://etc/passwd",
        "zip://a::file:///etc/passwd",
    ],
)
def test_no_file_outside_is_read_through_a_draft(site, train):
    with pytest.raises(tunekit.TunekitError, match=r"data\.train"):
        check_reach(site, recipe(data={"train": train}))


def test_no_model_outside_is_read_and_no_run_written_elsewhere(site):
    with pytest.raises(tunekit.TunekitError, match=r"model\.path"):
        check_reach(site, recipe(model="/etc"))
    for folder in ("/tmp/run", "../run", "link/run", "run", "runs/a/b", "runs"):
        with pytest.raises(tunekit.TunekitError, match=r"output\.dir|outside the workspace"):
            check_reach(site, recipe(output={"dir": folder}))


def test_a_machine_is_described_in_the_workspace_alone(site):
    check_machine(site, "8xh100")
    check_machine(site, "mine.yaml")
    with pytest.raises(tunekit.TunekitError, match="outside the workspace"):
        check_machine(site, "/etc/mine.yaml")


def test_a_run_is_not_continued_with_edits_that_lead_out(site, trained_run):
    site = Site(root=trained_run.path.parent.parent)
    check_edits(site, trained_run, ["train.max_steps=99", "parallel.nvme_path=swap"])
    for folder in ("/var/tmp", "../swap", "~/swap"):
        with pytest.raises(tunekit.TunekitError, match=r"parallel\.nvme_path"):
            check_edits(site, trained_run, [f"parallel.nvme_path={folder}"])
