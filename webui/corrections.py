"""Invalid rows of a file in an editor, a line each, to be corrected."""

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui.words import Words


class Corrections:
    """The editor and its button, hidden until it is filled.

    Args:
        words: The texts.
    """

    def __init__(self, words: Words) -> None:
        self.numbers = gr.Textbox("[]", visible=False)
        with gr.Column(visible=False, elem_id="data-corrections") as self.column:
            gr.Markdown(words("data.correct_help"))
            self.text = gr.Code(
                label=words("data.correct_rows"),
                language="json",
                interactive=True,
                wrap_lines=True,
                lines=4,
                max_lines=20,
                elem_id="data-corrected",
            )
            self.save = gr.Button(words("data.correct_save"), size="sm", elem_id="data-save-corrected")

    def offered(self, rows: list[frontend.InvalidRow]) -> list[Any]:
        """Return the column, the text and the numbers of rows."""
        text = "\n".join(row.text.replace("\n", " ") for row in rows)
        return [gr.Column(visible=True), text, json.dumps([row.number for row in rows])]


def corrected_rows(words: Words, text: str, numbers: Sequence[int]) -> dict[int, Any]:
    """Return corrected rows by their numbers, without those whose line is empty.

    Args:
        words: The page's texts.
        text: A row of JSON a line.
        numbers: The number of each in its file.

    Raises:
        TunekitError: There is not a line for each, or one is no JSON.
    """
    lines = text.split("\n")
    if len(lines) != len(numbers):
        problem = words("data.correct_lines", lines=len(lines), rows=len(numbers))
        raise tunekit.TunekitError(problem, hint=words("data.correct_one_each"))
    rows = {}
    for number, line in zip(numbers, lines, strict=True):
        try:
            if line.strip():
                rows[number] = json.loads(line)
        except ValueError as error:
            raise tunekit.TunekitError(f"{number}: {error}", hint=words("data.correct_one_each")) from error
    return rows
