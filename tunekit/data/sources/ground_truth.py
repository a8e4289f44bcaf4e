"""Answers of rows beside their prompts, for methods whose model answers the prompts itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUND_TRUTH = "ground_truth"
"""Column of the answer that completions are compared with."""


@dataclass(frozen=True)
class AnswerWords:
    """Words of errors about the answer of a row.

    Attributes:
        method: The method.
        column: Column of prompts in which the answer stands.
        name: The answer, in words.
        hint: Text to add to a row without one.
    """

    method: str
    column: str
    name: str
    hint: str


_WORDS = AnswerWords("ebft", GROUND_TRUTH, "answer", "add the text of a good answer")


def with_ground_truth(data: LoadedData) -> LoadedData:
    """Return rows as prompts with a column `ground_truth`, besides the other columns that they have.

    Args:
        data: Prompts with that column, or conversations, whose last answer takes its place.

    Raises:
        DataError: A row has no answer or no question, or more than text.
    """
    return as_prompts(data, _row)


def as_prompts(data: LoadedData, converted: Callable[[Row, str], Row]) -> LoadedData:
    """Return rows as prompts.

    Args:
        data: Rows.
        converted: Returns the prompt of a row, which is at a place that errors name.
    """

    def prompts(sources: tuple[Rows, ...]) -> tuple[Rows, ...]:
        return tuple(
            replace(
                rows,
                format="prompts",
                rows=RowStore(converted(row, rows.place(index)) for index, row in enumerate(rows.rows)),
            )
            for rows in sources
        )

    return replace(data, train=prompts(data.train), eval=prompts(data.eval))


def _row(row: Row, place: str) -> Row:
    prompt, answer = prompt_and_answer(row, place, _WORDS)
    columns = {name: value for name, value in row.items() if name not in ("messages", "completion", "tools")}
    return {**columns, "prompt": prompt, GROUND_TRUTH: answer}


def prompt_and_answer(row: Row, place: str, words: AnswerWords) -> tuple[Any, str]:
    """Return the prompt of a row, a text or messages, and its answer.

    Args:
        row: A prompt with a column of answers, a prompt with a completion, or a conversation.
        place: The row, for errors.
        words: The column, and words of errors.

    Raises:
        DataError: The row has no answer or no question, or more than text.
    """
    if row.get("tools"):
        problem = f"{place}: the row has tools, which {words.method} does not show"
        raise DataError(problem, hint="use method sft, or drop the row")
    if "messages" in row:
        prompt, answer = row["messages"][:-1], row["messages"][-1:]
    elif "completion" in row:
        prompt, answer = row["prompt"], row["completion"]
    else:
        prompt, answer = row["prompt"], row.get(words.column)
        if not isinstance(answer, str):
            problem = f"{place}: {words.column} is " + ("missing" if answer is None else "not a text")
            raise DataError(
                problem, hint=f"{words.hint}; if it is in another column, set data.columns={{completion: NAME}}"
            )
    if isinstance(answer, list):
        if not prompt or [message["role"] for message in answer] != ["assistant"]:
            problem = f"{place}: the row does not end with one answer to a question"
            raise DataError(problem, hint="end each conversation with an assistant message after a user message")
        answer = answer[0].get("content")
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{place}: the {words.name} has no text", hint="drop the row, or write its answer as text")
    return prompt, answer


def ground_truth_tokens(text: str, tokenizer: "PreTrainedTokenizerBase") -> Sequence[int]:
    """Return the token ids of an answer as they follow those of its prompt, without an end token."""
    return cast(Sequence[int], tokenizer(text, add_special_tokens=False)["input_ids"])
