"""Consoles print brackets as they are: rich would take them for markup, and drop or refuse them."""

import pytest

from tunekit.api.doctor import Diagnosis, Package
from tunekit.display.console import diagnosis_table, make_console, make_error_console

WORDS = "[INST] pip install 'tunekit[vllm]' [/INST]"


def test_brackets_are_text_on_both_streams(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print(f"note: {WORDS}")
    make_error_console().print(WORDS)
    shown = capsys.readouterr()
    assert shown.out == f"note: {WORDS}\n" and WORDS in shown.err.replace("\n", " ")


def test_the_command_that_installs_an_extra_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    absent = Package("vllm", None, ">=0.24", "vllm")
    make_console().print(diagnosis_table(Diagnosis("0.1.0", "CPython", "Linux", None, (absent,), ())))
    assert "pip install 'tunekit[vllm]'" in capsys.readouterr().out
