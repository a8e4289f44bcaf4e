"""The export tab: what it offers, what it refuses, and what it says of what was made; and the report beside it."""

import io
import json
import re
import zipfile

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.waiting import until
from webui import exports
from webui.download_route import add_download
from webui.export_view import begin, look
from webui.report_route import add_report
from webui.site import Site
from webui.words import Words

SEEN, LINKS, SHOWN, CHECKPOINT, KIND, START, STATUS = range(7)


@pytest.fixture
def site(workspace, trained_run):
    return Site(root=workspace)


def wanted(**changes):
    return {"checkpoint": "", "kind": "merged", "dtype": "auto", "dest": "", **changes}


def until_over(run):
    """Wait for the end of an export; one that is refused may be over before anybody looks for its thread."""
    until(lambda: exports.progress_of(run).is_over)


def test_a_finished_run_offers_its_result_and_its_checkpoints(site, trained_run):
    found = look(site, Words("en"), trained_run.name, "")
    assert [value for _, value in found[CHECKPOINT].choices] == ["", "8", "4"]
    assert [value for _, value in found[KIND].choices] == ["merged", "adapter"]
    assert found[START].interactive and found[STATUS] == ""
    assert "Nothing exported yet" in found[SHOWN]
    assert f"/report?run={trained_run.name}" in found[LINKS] and f"/chat?run={trained_run.name}" in found[LINKS]
    again = look(site, Words("en"), trained_run.name, found[SEEN])
    assert again == [gr.skip()] * len(again), "nothing has changed"


def test_a_run_that_trained_for_few_bits_offers_them(site, trained_run):
    recipe = trained_run.path / "recipe.yaml"
    recipe.write_text(re.sub(r"(?m)^  qat: null$", "  qat: {weight_dtype: int8}", recipe.read_text()))
    found = look(site, Words("en"), trained_run.name, "")
    assert [value for _, value in found[KIND].choices] == ["merged", "quantized"]


def test_a_run_without_result_and_checkpoint_says_why_nothing_can_be_done(site, trained_run):
    status = trained_run.status()
    (trained_run.path / "status.json").write_text(json.dumps({**status, "phase": "failed"}))
    for folder in (trained_run.path / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    found = look(site, Words("en"), trained_run.name, "")
    assert not found[START].interactive and "Nothing to export yet" in found[STATUS]


@pytest.mark.slow
def test_an_export_is_made_and_its_check_is_told_to_every_browser(site, trained_run):
    assert "Starting" in begin(site, Words("en"), trained_run.name, **wanted(dest="taken/away"))
    assert "is already being exported" in begin(site, Words("en"), trained_run.name, **wanted())
    busy = look(site, Words("en"), trained_run.name, "")
    assert not busy[START].interactive
    until_over(trained_run)
    for language, words in (("en", "greedy tokens match"), ("zh", "贪心词元")):
        found = look(site, Words(language), trained_run.name, busy[SEEN])
        assert "taken/away" in found[SHOWN] and words in found[SHOWN] and found[START].interactive
    assert json.loads((site.root / "taken" / "away" / "export.json").read_text())["kind"] == "merged"
    begin(site, Words("en"), trained_run.name, **wanted(dest="taken/away"))
    until_over(trained_run)
    assert "exists and is not empty" in look(site, Words("en"), trained_run.name, "")[STATUS]


@pytest.mark.parametrize("dest", ["../out", "/tmp/out", "link/out", "a\nb"])
def test_nothing_is_exported_out_of_the_workspace(site, trained_run, dest):
    (site.root / "link").symlink_to(site.root.parent)
    assert "role='alert'" in begin(site, Words("en"), trained_run.name, **wanted(dest=dest))
    assert exports.progress_of(trained_run) is None


def test_what_an_export_says_of_itself_is_text(site, trained_run):
    folder = trained_run.path / "export" / "<b>"
    folder.mkdir(parents=True)
    check = {"logit_error": 0.1, "tolerance": 0.2, "num_conversations": 3, "num_tokens": 0, "adapter_change": None}
    told = {"kind": "<script>", "dtype": "<i>", "total_bytes": 1, "check": check}
    (folder / "export.json").write_text(json.dumps(told))
    shown = look(site, Words("en"), trained_run.name, "")[SHOWN]
    assert "<script>" not in shown and "<i>" not in shown and "<b>" not in shown and "&lt;script&gt;" in shown
    (folder / "export.json").write_text("{broken")
    assert "Nothing exported yet" in look(site, Words("en"), trained_run.name, "")[SHOWN]


def test_the_report_is_a_page_that_may_do_nothing(site, trained_run):
    app = FastAPI()
    add_report(app, site)
    with TestClient(app) as client:
        page = client.get("/report", params={"run": trained_run.name})
        assert page.status_code == 200 and trained_run.name in page.text
        policy = page.headers["content-security-policy"]
        assert "sandbox" in policy and "default-src 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff" and "content-disposition" not in page.headers
        kept = client.get("/report", params={"run": trained_run.name, "download": "1"})
        assert kept.headers["content-disposition"].startswith("attachment") and kept.text.startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["", "..", "../outside", "nothing", "<script>alert(1)</script>", "a\0b", "x" * 300])
def test_of_what_is_no_run_there_is_no_report(workspace, name):
    app = FastAPI()
    add_report(app, Site(root=workspace))
    with TestClient(app) as client:
        found = client.get("/report", params={"run": name})
    assert (
        found.status_code == 404
        and "<script>" not in found.text
        and "sandbox" in found.headers["content-security-policy"]
    )


def test_an_export_is_downloaded_as_a_zip_file(site, trained_run):
    folder = trained_run.path / "export" / "merged"
    (folder / "parts").mkdir(parents=True)
    contents = {"export.json": b"{}", "model.safetensors": bytes(range(256)) * 2**13, "parts/a b.txt": b""}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "link").symlink_to("/etc/passwd")
    app = FastAPI()
    add_download(app, site)
    with TestClient(app) as client:
        answer = client.get("/download", params={"path": f"runs/{trained_run.name}/export/merged"})
        assert answer.headers["content-disposition"].endswith("merged.zip")
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == {
                f"merged/{name}": content for name, content in contents.items()
            }
        for path in ("", "..", "/etc", "runs", f"runs/{trained_run.name}/model"):
            refused = client.get("/download", params={"path": path})
            assert refused.status_code == 404 and "role='alert'" in refused.text
    app = FastAPI()
    add_download(app, Site(site.root, read_only=True))
    with TestClient(app) as client:
        assert client.get("/download", params={"path": f"runs/{trained_run.name}/export/merged"}).status_code == 404


def test_what_the_hub_or_llama_cpp_needs_is_told_before_anything_is_written(site, trained_run, monkeypatch):
    monkeypatch.setenv("PATH", str(site.root))
    for changes, problem in (({"gguf": "q8_0"}, "llama.cpp"), ({"push": "not a name"}, "not a name")):
        begin(site, Words("en"), trained_run.name, **wanted(**changes))
        until_over(trained_run)
        assert problem in look(site, Words("en"), trained_run.name, "")[STATUS]
    assert not (trained_run.path / "export").exists()
