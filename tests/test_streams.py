"""What is shown of a run may go nowhere: a pager that is quit, a closed terminal or a full disk ends no run."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tests.tiny import save_chats
from tunekit.display.console import Progress, make_console
from tunekit.display.sweep import SweepProgress
from tunekit.redact import lasting, outlive_readers
from tunekit.runs.run import Run


def without_a_reader():
    """A stream into a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


def on_a_full_disk():
    return Path("/dev/full").open("w", buffering=1)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_table_that_is_redirected_has_no_blanks_at_the_ends_of_its_lines(capsys):
    console = make_console()
    table = Table("name", "value")
    table.add_row("a  b", "1 ")
    console.print(table, "ends with blanks   ")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "a  b" in lines[3]
    assert not [line for line in lines if line.endswith(" ")]


@pytest.mark.parametrize("make", [without_a_reader, on_a_full_disk, closed])
def test_what_is_shown_of_a_run_may_go_nowhere(make, monkeypatch):
    stream = make()
    monkeypatch.setattr(sys, "stdout", lasting(stream) if make is closed else stream)
    progress = Progress()
    for number in range(3):
        progress({"event": "warning", "message": f"the {number}th warning"})
    monkeypatch.setattr(sys, "stderr", stream)
    outlive_readers()
    SweepProgress(progress.console)({"event": "stop", "again": False})
    print("more", flush=True)
    print("more", file=sys.stderr, flush=True)
    # What it still holds can be written nowhere.
    try:
        stream.close()
    except OSError:
        assert make is not closed


def test_what_can_be_written_is_written_and_what_is_wrong_otherwise_is_told():
    whole, narrow = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert lasting(whole).write("words") == 5 and whole.getvalue() == "words"
    with pytest.raises(UnicodeEncodeError):
        lasting(narrow).write("ä")


def test_a_command_whose_streams_are_closed_does_its_work(tmp_path):
    command = f"{sys.executable} -m tunekit recipes copy sft/quickstart {tmp_path / 'copy.yaml'} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert (tmp_path / "copy.yaml").is_file()


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path):
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    text = "model: pico\ndata: {train: rows.jsonl, max_length: 64}\ntrain: {max_steps: 1, global_batch_size: 2}\n"
    (tmp_path / "mine.yaml").write_text(f"{text}output: {{sample_prompts: [], dir: run}}\n", encoding="utf-8")
    command = [sys.executable, "-m", "tunekit", "train", "mine.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("reading")
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)
    assert Run(tmp_path / "run").state == "finished"
