"""What comes after a run leads out of no folder, runs no code that was not asked for, and tells no secret."""

import contextlib
import json
import shutil

import pytest

import tunekit
from tests.security.test_names import EVIL, LINES
from tests.tiny import save_chats
from tunekit.exporting.export import export
from tunekit.inference.chat import chat
from tunekit.reporting.report import report

OPENERS = {"export": export, "chat": lambda name: chat(name).close(), "report": report}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("after")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    return tunekit.train(
        {
            "model": "pico",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
            "train": {"max_steps": 2, "save_steps": 1, "global_batch_size": 2, "learning_rate": 1e-2},
            "output": {"dir": str(folder / "runs" / "one"), "sample_prompts": []},
        }
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "pwned").exists(), "a shell read a name"


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", [*EVIL, *LINES, "", "..", "../one", "/", "/etc/passwd", "x" * 300])
@pytest.mark.parametrize("verb", OPENERS)
def test_what_is_no_run_is_refused_in_words(verb, name, here):
    with pytest.raises(tunekit.TunekitError):
        OPENERS[verb](name)


@pytest.mark.parametrize("verb", OPENERS)
def test_a_link_among_the_runs_leads_nowhere_else(verb, run, here):
    (here / "runs").mkdir()
    (here / "runs" / "link").symlink_to(run.path)
    with pytest.raises(tunekit.TunekitError, match="is a link out of runs"):
        OPENERS[verb]("link")


@pytest.mark.parametrize("name", ["../../../model", "/etc", "..", ".", "checkpoint-1/../..", "1\0", "x" * 300, ""])
def test_a_checkpoint_is_one_of_the_run(name, run, here):
    for verb in (export, chat):
        with pytest.raises(tunekit.TunekitError):
            verb(run, checkpoint=name)
    (run.path / "checkpoints" / "checkpoint-9").symlink_to(here)
    try:
        with pytest.raises(tunekit.TunekitError):
            export(run, checkpoint="9")
    finally:
        (run.path / "checkpoints" / "checkpoint-9").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVIL[1:4])
def test_an_export_of_any_name_is_a_folder_of_that_name(name, run, here):
    done = export(run, here / name, kind="adapter")
    assert (here / name / "adapter_model.safetensors").is_file() and done.folder == str(here / name)


CODE = "from pathlib import Path\nPath({sentinel!r}).touch()\nclass Own:\n    pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["export", "chat"])
def test_code_beside_a_result_is_not_run(verb, run, here):
    folder = shutil.copytree(run.path, here / "copy")
    for name, key in (("tokenizer_config.json", "AutoTokenizer"), ("adapter_config.json", "AutoModel")):
        config = json.loads((folder / "model" / name).read_text())
        own = ["own.Own", None] if key == "AutoTokenizer" else "own.Own"
        (folder / "model" / name).write_text(json.dumps({**config, "tokenizer_class": "Own", "auto_map": {key: own}}))
    (folder / "model" / "own.py").write_text(CODE.format(sentinel=str(here / "pwned")))
    with contextlib.suppress(tunekit.TunekitError):
        OPENERS[verb](str(folder))
    assert not (here / "pwned").exists()


@pytest.mark.slow
def test_a_secret_of_the_environment_is_in_no_report_and_in_no_export(run, here, monkeypatch):
    canary = "c4nary-Zq81/xTrK+0pw"
    monkeypatch.setenv("SERVICE_TOKEN", canary)
    folder = shutil.copytree(run.path, here / "copy")
    with (folder / "events.jsonl").open("a") as events:
        for event in ({"event": "warning", "message": canary}, {"event": "sample", "prompt": canary, "answer": canary}):
            events.write(json.dumps({"time": 1.0, "when": "after", **event}) + "\n")
    assert canary not in report(folder)
    export(str(folder), here / "out", kind="adapter")
    assert not [file for file in (here / "out").rglob("*") if file.is_file() and canary.encode() in file.read_bytes()]
