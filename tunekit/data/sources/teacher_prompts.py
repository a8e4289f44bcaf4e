"""Prompts of a teacher that is shown more than the model that learns from it: a demonstration of the answer."""

from typing import Any

from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.ground_truth import AnswerWords, as_prompts, prompt_and_answer
from tunekit.data.sources.load import LoadedData
from tunekit.errors import DataError

CONTEXT = "privileged_context"
"""Column of what the teacher is shown, by TRL's name."""

TEACHER_PROMPT = "teacher_prompt"
"""Column of the prompts that the teacher reads."""

_WORDS = AnswerWords(
    "sdft",
    CONTEXT,
    "demonstration",
    "add a text that shows the teacher how to answer, such as a demonstration",
)


def with_teacher_prompts(data: LoadedData, template: str) -> LoadedData:
    """Return rows as prompts, with those that the teacher reads.

    Args:
        data: Prompts with a column `privileged_context`, or conversations, whose last answer takes its place.
        template: Template of the teacher's prompts, with `{prompt}` and `{privileged_context}`.

    Raises:
        DataError: A row has no demonstration or no question, or more than text.
    """
    return as_prompts(data, lambda row, place: _row(row, place, template))


def _row(row: Row, place: str, template: str) -> Row:
    prompt, context = prompt_and_answer(row, place, _WORDS)
    if isinstance(prompt, str):
        teacher_prompt: Any = template.format(prompt=prompt, privileged_context=context)
    else:
        question = prompt[-1]
        if question["role"] != "user" or not isinstance(question["content"], str):
            problem = f"{place}: the prompt ends with a message of role {question['role']!r}"
            raise DataError(f"{problem}, not with a user's text", hint="end each prompt with a user message")
        content = template.format(prompt=question["content"], privileged_context=context)
        teacher_prompt = [*prompt[:-1], {**question, "content": content}]
    return {"prompt": prompt, CONTEXT: context, TEACHER_PROMPT: teacher_prompt}
