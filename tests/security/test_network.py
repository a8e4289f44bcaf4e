"""Nothing is sent anywhere: a run on local files makes no connection, and the libraries' reports are off."""

import json
import os
import subprocess
import sys

import pytest

from tests.tiny import save_chats, save_tiny_model
from tunekit.process.log_capture import SILENT

HOOK = """\
import os, sys

def told(event, args):
    if event in ("socket.connect", "socket.sendto"):
        where = args[1] if not isinstance(args[1], tuple) else args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        where = args[0]
    else:
        return
    with open(os.environ["CONNECTIONS"], "a") as file:
        print(event, repr(where), file=file)

sys.addaudithook(told)
"""
"""What writes down every connection that a Python process tries."""

LOCAL = ("'127.", "'::1'", "'localhost'", "None", "'/", "b'", "'\\x00")


@pytest.fixture
def watched(tmp_path):
    """The environment of a process whose connections are written down, and the file that they are in."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = {name: value for name, value in os.environ.items() if name not in (*SILENT, "CI", "HF_HUB_OFFLINE")}
    return {**others, "PYTHONPATH": path, "CONNECTIONS": str(tmp_path / "connections")}, tmp_path / "connections"


def connections(file):
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if not line.partition(" ")[2].startswith(LOCAL)]


SEND = """
from huggingface_hub.utils import _telemetry, send_telemetry
send_telemetry('canary')
_telemetry._TELEMETRY_QUEUE.join()
"""
"""Sends what a library reports, and waits until its thread has done so."""


@pytest.mark.slow
def test_a_report_of_a_library_would_be_seen(watched):
    environment, file = watched
    subprocess.run([sys.executable, "-c", SEND], env=environment, check=True)
    assert connections(file)


def test_reports_are_off_also_where_the_library_was_there_before(watched):
    environment, file = watched
    first = (
        "import huggingface_hub.constants; from tunekit.process.log_capture import send_nothing_at_all as off; off()"
    )
    subprocess.run([sys.executable, "-c", first + SEND], env=environment, check=True)
    assert connections(file) == []


@pytest.mark.slow
def test_a_run_makes_no_connection(watched, tmp_path):
    environment, file = watched
    save_tiny_model(tmp_path / "model", hidden=16, layers=1)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 2},
        "output": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "tunekit", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert connections(file) == []
