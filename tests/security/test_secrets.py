"""Secrets: refused in recipes, and in nothing that a run writes or prints."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LOOK_SECONDS
from tunekit.api import verbs
from tunekit.errors import RecipeError
from tunekit.recipe.load import load_recipe
from tunekit.redact import REDACTED, Redacting, redacted, redacting_pipe, without_secrets

CANARY = "c4nary-Zq81/xTrK+0pw"
"""A secret that no pattern knows."""

HUB = "hf_" + "Q" * 8 + "canary" + "z" * 20


@pytest.fixture
def canary(monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", CANARY)
    monkeypatch.setenv("HF_TOKEN", HUB)


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"model": {"path": HUB}}, "model.path"),
        ({"output": {"name": "sk-" + "a1" * 12}}, "output.name"),
        ({"data": {"train": f"https://host/a.jsonl?x=1&token={'k' * 12}"}}, "data.train.path"),
        ({"data": {"train": "s3://ada:pass:word@host/a.jsonl"}}, "data.train.path"),
        ({"data": {"train": ["a.jsonl", "https://u:geheim99@host/b.jsonl"]}}, "data.train[1].path"),
        ({"method": {"type": "sft", "trainer_args": {"hub_token": "whatever"}}}, "method.trainer_args.hub_token"),
        ({"method": {"type": "sft", "trainer_args": {"eos_token": HUB}}}, "method.trainer_args.eos_token"),
        ({"output": {"sample_prompts": ["hi", f"my key is {CANARY}"]}}, "output.sample_prompts[1]"),
        ({"train": {"learning_rate": "AKIA" + "Q7" * 8}}, "train.learning_rate"),
        ({"model": {"path": "pico", "token": "ghp_" + "a" * 36}}, "model.token"),
        ({"data": {"train": "a.jsonl", "columns": {"prompt": "xoxb-12345678-abc"}}}, "data.columns.prompt"),
    ],
)
def test_a_recipe_with_a_secret_is_refused_where_it_stands_and_without_telling_it(keys, place, canary):
    recipe = {"model": "pico", "data": {"train": "a.jsonl"}, **keys}
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe)
    said = str(refused.value)
    assert f"recipe: {place}: contains " in said and "recipes must not contain secrets; " in said
    held = json.dumps(keys)
    for secret in (HUB, CANARY, "pass:word", "geheim99", "k" * 12, "whatever", "a1" * 12, "Q7" * 8, "a" * 36):
        assert secret not in held or secret not in said


@pytest.mark.parametrize("override", [f"model.path={HUB}", f"output.name={HUB}", f"{HUB}", f"nothing.here={HUB}"])
def test_an_override_with_a_secret_is_refused_without_telling_it(override):
    with pytest.raises(RecipeError) as refused:
        load_recipe({"model": "pico", "data": {"train": "a.jsonl"}}, [override])
    assert HUB not in str(refused.value)


def test_a_password_may_come_from_the_environment_and_stay_there(canary, monkeypatch):
    monkeypatch.setenv("TUNEKIT_TRUSTED_HOSTS", "host")
    recipe = load_recipe({"model": "pico", "data": {"train": "https://ada:${SERVICE_TOKEN}@host/a.jsonl"}})
    assert recipe.data.train.path == f"https://ada:{CANARY}@host/a.jsonl"
    # What was loaded is not refused when it is loaded again.
    assert load_recipe(recipe, ["train.max_steps=3"]).data == recipe.data


def test_a_password_that_only_begins_with_a_variable_is_refused(canary, monkeypatch):
    monkeypatch.setenv("TUNEKIT_TRUSTED_HOSTS", "host")
    with pytest.raises(RecipeError, match=r"recipe: data\.train\.path: contains a password in a URL"):
        load_recipe({"model": "pico", "data": {"train": "https://ada:${SERVICE_TOKEN}geheim99@host/a.jsonl"}})


@pytest.mark.parametrize("keys", [{"model": "/models/${SERVICE_TOKEN}"}, {"output": {"dir": "/runs/${HF_TOKEN}"}}])
def test_a_variable_that_is_secret_by_its_name_is_no_part_of_a_path(keys, canary):
    with pytest.raises(RecipeError, match="looks like a secret"):
        load_recipe({"model": "pico", "data": {"train": "a.jsonl"}, **keys})


def test_ordinary_recipes_hold_no_secret():
    words = ["what is a token?", "sk-learn and hf_models", "https://host/a.jsonl?v=2", "key=value", "s3://b/a@b.jsonl"]
    recipe = {"model": "pico", "data": {"train": "a.jsonl"}, "output": {"sample_prompts": words}}
    assert load_recipe(recipe).output.sample_prompts == words


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (f"got {CANARY}!", f"got {REDACTED}!"),
        ("c4nary-Zq81%2FxTrK%2B0pw in a URL", f"{REDACTED} in a URL"),
        (f"Bearer {'t' * 20}", f"Bearer {REDACTED}"),
        (f"a {HUB} b", f"a {REDACTED} b"),
        ("https://ada:geheim@host/x?sig=12345&v=2", f"https://ada:{REDACTED}@host/x?sig={REDACTED}&v=2"),
        ("step 3 of 10, loss 0.5, tokens per second", "step 3 of 10, loss 0.5, tokens per second"),
        ("http://host:8000/v1 user@host", "http://host:8000/v1 user@host"),
    ],
)
def test_a_text_is_told_without_its_secrets(text, safe, canary):
    assert redacted(text) == safe


def test_common_words_and_paths_are_no_secrets(monkeypatch, tmp_path):
    for name, value in {"A_TOKEN": "true", "B_KEY": "training", "C_PASSWORD": "x", "D_KEY": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    text = f"true training x {tmp_path}"
    assert redacted(text) == text


def test_plain_data_keeps_its_shape(canary):
    given = {"step": 3, "words": [f"a {CANARY}", None], CANARY: 1.5}
    assert without_secrets(given) == {"step": 3, "words": [f"a {REDACTED}", None], CANARY: 1.5}


@pytest.mark.slow
def test_what_processes_write_is_redacted_line_by_line(canary):
    log = io.BytesIO()
    with redacting_pipe(log) as output:
        words = f"import os; print('out', os.environ['SERVICE_TOKEN']); os.write(2, b'{CANARY} of C\\n'); print('end')"
        subprocess.run([sys.executable, "-u", "-c", words], stdout=output, stderr=output, check=True)
    assert log.getvalue().decode() == f"out {REDACTED}\n{REDACTED} of C\nend\n"


def test_a_stream_without_secrets_is_a_stream(canary):
    stream = Redacting(sys.__stdout__)
    assert (stream.encoding, stream.fileno(), stream.isatty()) == (
        sys.__stdout__.encoding,
        sys.__stdout__.fileno(),
        sys.__stdout__.isatty(),
    )


# What a run writes ---------------------------------------------------------------------------------------------------

REWARD = """\
import os, sys, warnings

def loud(completions, **columns):
    print("a print of", os.environ["SERVICE_TOKEN"])
    warnings.warn("a warning of " + os.environ["HF_TOKEN"])
    os.write(2, ("C says " + os.environ["SERVICE_TOKEN"] + "\\n").encode())
    return [float(len(one) % 7) for one in completions]

def failing(completions, **columns):
    loud(completions)
    raise ValueError("cannot log in with " + os.environ["SERVICE_TOKEN"] + " or " + os.environ["HF_TOKEN"])
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    save_tiny_model(folder / "model")
    # A row with a key in it: the user's own data, of which samples are shown.
    prompts = [{"prompt": f"say {n}, my key is {HUB}"} for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "own_rewards.py").write_text(REWARD)
    return folder


def recipe_for(name, reward, *, max_restarts):
    method = {"type": "grpo", "rewards": [f"own_rewards:{reward}"], "num_generations": 2, "max_completion_length": 4}
    return {
        "model": "model",
        "data": {"train": "prompts.jsonl", "max_length": 96},
        "method": method,
        "train": {"max_steps": 1, "global_batch_size": 2},
        "parallel": {"num_processes": 1, "max_restarts": max_restarts},
        "output": {"dir": name},
    }


def told_in(folder: Path) -> list[str]:
    """Files of a folder that hold a canary, but for the rows that are trained on."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".arrow"]
    return [str(file) for file in files if any(secret.encode() in file.read_bytes() for secret in (CANARY, HUB))]


def test_no_secret_is_in_anything_that_a_run_writes(workspace, tmp_path, monkeypatch, canary, capsys):
    monkeypatch.chdir(workspace)
    run = verbs.train(recipe_for(str(tmp_path / "run"), "loud", max_restarts=0), on_event=print)
    assert run.state == "finished"
    assert told_in(tmp_path) == []
    assert "a print of [redacted]" in (run.path / "log.txt").read_text()
    printed = "".join(capsys.readouterr())
    assert "my key is [redacted]" in printed
    assert CANARY not in printed and HUB not in printed


@pytest.mark.slow
def test_no_secret_is_in_anything_that_a_run_that_fails_writes_prints_or_shows(workspace, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_for(str(tmp_path / "run"), "failing", max_restarts=1)))
    environment = {**os.environ, "SERVICE_TOKEN": CANARY, "HF_TOKEN": HUB, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tunekit", "train", str(recipe)]
    seen = set()
    with subprocess.Popen(
        command, cwd=workspace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        os.set_blocking(process.stdout.fileno(), False)
        printed = b""
        while process.poll() is None:
            printed += process.stdout.read() or b""
            seen |= command_lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        printed += process.stdout.read() or b""
    assert process.returncode == 2, printed.decode()
    assert any(b"tunekit" in line for line in seen)
    for secret in (CANARY, HUB):
        assert secret.encode() not in printed
        assert not [line for line in seen if secret.encode() in line]
    assert told_in(tmp_path) == []
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").glob("*.*"))
    assert b"a print of [redacted]" in written and b"C says [redacted]" in written
    assert "cannot log in with [redacted]" in " ".join(printed.decode().split())


@pytest.mark.slow
def test_a_card_has_the_name_of_what_a_path_took_from_the_environment(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    login = "no-name-tells-7"
    monkeypatch.setenv("MY_CRED", login)
    (tmp_path / login).mkdir()
    save_chats(tmp_path / login / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    recipe = {
        "model": "model",
        "data": {"train": f"{tmp_path}/${{MY_CRED}}/rows.jsonl", "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 2},
        "output": {"dir": str(tmp_path / "run"), "sample_prompts": []},
    }
    run = verbs.train(recipe)
    card = (run.model_path / "README.md").read_text()
    assert login not in card and card.count(f"{tmp_path}/${{MY_CRED}}/rows.jsonl") == 2
    assert login in (run.path / "recipe.yaml").read_text()  # it resumes by that


def command_lines() -> set[bytes]:
    lines = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.add(entry.read_bytes())
        except OSError:
            continue
    return lines


def test_a_source_that_cannot_be_read_is_told_without_its_password(workspace, monkeypatch, tmp_path):
    password = "c4nary-in-a-url"
    monkeypatch.setenv("SERVICE_TOKEN", password)
    monkeypatch.setenv("TUNEKIT_TRUSTED_HOSTS", "127.0.0.1")
    monkeypatch.chdir(workspace)
    source = "http://ada:${SERVICE_TOKEN}@127.0.0.1:9/a.jsonl"
    recipe = {"model": "model", "data": {"train": source}, "output": {"dir": str(tmp_path / "run")}}
    for verb in (verbs.plan, verbs.check, verbs.train, verbs.data_report):
        with pytest.raises(Exception) as failed:
            verb(recipe)
        words = str(failed.value) + repr(failed.value.__cause__)
        assert "127.0.0.1:9" in words and password not in words
    assert not (tmp_path / "run").exists()
