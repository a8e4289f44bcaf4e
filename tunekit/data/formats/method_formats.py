"""Formats that a training method learns from, and advice for rows in others."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.data.formats.row_formats import BECOMES, COLUMNS, listed, misspelt
from tunekit.recipe.methods import METHODS
from tunekit.recipe.sections.data import SourceFormat

_SPOKEN: dict[SourceFormat, str] = {
    "messages": "conversations",
    "sharegpt": "conversations",
    "alpaca": "conversations",
    "prompt_completion": "prompts with completions",
    "text": "texts",
    "tokens": "token ids",
    "preference": "preference pairs",
    "ranking": "rankings",
    "unpaired_preference": "rated completions",
    "prompts": "prompts without completions",
}

_ANSWERS = ("response", "answer", "output", "solution", "target")
"""Common names of a column of answers."""


_ANOTHER_METHOD: dict[tuple[SourceFormat, SourceFormat], str] = {
    ("unpaired_preference", "preference"): "for pairs use method dpo; for kto write each answer as a row of its own, "
    "with a label true or false",
    ("unpaired_preference", "prompt_completion"): "add a column label, true for good answers and false for bad ones",
    ("preference", "unpaired_preference"): "for answers that are good or bad by themselves use method kto",
    ("preference", "prompt_completion"): "to imitate completions use method sft",
}
"""Advice where the rows are of the second format and the method learns from the first."""


@dataclass(frozen=True)
class Learner:
    """A training method by its name in recipes, and the formats that it learns from."""

    method: str
    formats: tuple[SourceFormat, ...]

    def refusal(self, format: SourceFormat, columns: Sequence[str]) -> tuple[str, str | None] | None:
        """Return why the method refuses rows of a format, and the remedy; None where it accepts them.

        Args:
            format: The format of a source.
            columns: All columns of the source, under our names.
        """
        if BECOMES[format] in self.formats:
            return None
        *most, last = (_SPOKEN[format] for format in self.formats)
        takes = f"{', '.join(most)} or {last}" if most else last
        what = f"holds {_SPOKEN[format]} ({listed(COLUMNS[format])}), and method {self.method} learns from {takes}"
        if "prompt_completion" in self.formats:
            return what, _completions_of(format, columns)
        return what, _ANOTHER_METHOD.get((self.formats[0], BECOMES[format]))


def learner_of(method: str) -> Learner:
    """Return the formats that a method learns from, by `method.type`."""
    return Learner(method, METHODS[method].spec.row_formats)


def _completions_of(format: SourceFormat, columns: Sequence[str]) -> str:
    """Describe how to read rows of another format as prompts with completions."""
    match format:
        case "preference":
            return (
                "to imitate the better answers, set data.columns={completion: chosen}, or {messages: chosen} if it "
                "holds whole conversations"
            )
        case "ranking":
            return "to imitate the best answers, let a function take them (data.format=module:function)"
        case "unpaired_preference":
            return "to imitate all completions, good and bad, set data.format=prompt_completion"
    answers = next((column for column in _ANSWERS if column in columns), None)
    if answers is not None:
        return f"to imitate what stands in {answers}, set data.columns={{completion: {answers}}}"
    return misspelt(columns, ["completion"]) or "beside prompt, a column completion is needed"
