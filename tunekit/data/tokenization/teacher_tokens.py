"""Rows in the tokens of a teacher with another tokenizer, beside those of the model that learns from it.

Both read the same messages, each by its own chat template, so what stands between answers differs. The answers do not:
each is the same bytes on both sides, and a row in which one is not is refused.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.data.packing.sequences import IGNORED, Sequences
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.token_bytes import TokenBytes, answers_in, pieces_of
from tunekit.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER_IDS = "teacher_input_ids"
"""Column of the token ids of a row that a teacher with another tokenizer reads."""

TEACHER_LABELS = "teacher_labels"
"""Column of those of them that stand in answers, -100 for others."""

_HINT = "use chat templates that write answers alike: set model.chat_template or method.teacher.chat_template"
_PLAIN_HINT = "end prompts with a line break, so that no token has a part of the prompt and of the completion"
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class TeacherTokenizer:
    """Tokenizers of a model and of its teacher.

    Attributes:
        tokenizer: That of the teacher, with its chat template.
        own: Bytes of the model's tokens.
        its: Bytes of the teacher's tokens.
    """

    tokenizer: "PreTrainedTokenizerBase"
    own: TokenBytes
    its: TokenBytes

    @classmethod
    def of(
        cls, own: "PreTrainedTokenizerBase", own_path: str, its: "PreTrainedTokenizerBase", its_path: str
    ) -> "TeacherTokenizer":
        """Return both, if their tokens can be aligned.

        Args:
            own: The tokenizer of the model.
            own_path: Where the model comes from.
            its: The tokenizer of the teacher.
            its_path: Where the teacher comes from.

        Raises:
            ModelError: One of them is of another kind, or both are the same.
        """
        if own.get_vocab() == its.get_vocab():
            problem = f"method.teacher: {its_path!r} has the tokenizer of the model"
            raise ModelError(problem, hint="use method gkd, which compares probabilities token by token")
        return cls(its, TokenBytes(own, "model.path", own_path), TokenBytes(its, "method.teacher", its_path))


class TeacherRows:
    """Rows of a source as its teacher reads them.

    Args:
        rows: The rows.
        own: Their sequences in tokens of the model, a row each.
        its: Those in tokens of the teacher, of which nothing is cut.
        tokenizers: Both tokenizers.
        max_length: Longest sequence, in tokens of the teacher.
    """

    def __init__(
        self, rows: Rows, own: Sequences, its: Sequences, tokenizers: TeacherTokenizer, max_length: int
    ) -> None:
        self._rows, self._own, self._its = rows, own, its
        self._tokenizers, self._max_length = tokenizers, max_length
        self._number_of = {row: number for number, row in enumerate(its.rows.tolist())}

    def of_sequence(self, number: int) -> tuple[list[int], list[int]]:
        """Return the token ids and labels that the teacher has for a sequence of the model's.

        Raises:
            DataError: An answer is another text.
        """
        row = int(self._own.rows[number])
        sequence = self._own[number]
        is_cut = len(sequence["input_ids"]) < self._own.row_lengths[row]
        ids, labels = self._row(row)
        own, its = self._tokenizers.own, self._tokenizers.its
        answers = [
            own.of(sequence["input_ids"][start:end])
            for start, end in answers_in(sequence["input_ids"], sequence["labels"], own.special)
        ]
        places = answers_in(ids, labels, its.special)
        texts = [its.of(ids[start:end]) for start, end in places]
        for index, answer in enumerate(answers):
            text = b"".join(texts[index]) if index < len(texts) else b""
            ends_here = is_cut and index == len(answers) - 1
            written = b"".join(answer)
            if not (text.startswith(written) if ends_here else text == written):
                raise self._differing(row, written, text)
        if len(answers) < len(texts):
            if not is_cut:
                raise self._differing(row, b"", b"".join(texts[len(answers)]))
            places = places[: len(answers)]
        if is_cut and places:
            # The teacher reads what is left of the row in the model's tokens.
            pieces = pieces_of(answers[-1], texts[len(answers) - 1])
            end = places[-1][0] + (pieces[-1][1] if pieces else 0)
            ids, labels = ids[:end], labels[:end]
        return ids[: self._max_length], labels[: self._max_length]

    def _row(self, row: int) -> tuple[list[int], list[int]]:
        number = self._number_of.get(row)
        if number is None:
            return [0], [IGNORED]
        sequence = self._its[number]
        return sequence["input_ids"], sequence["labels"]

    def _differing(self, row: int, own: bytes, its: bytes) -> DataError:
        problem = f"{self._rows.place(row)}: an answer is another text to the teacher: the model reads "
        is_plain = isinstance(self._rows.rows[row].get("prompt"), str)
        problem = f"{problem}{_shown(own, its)}, the teacher {_shown(its, own)}"
        return DataError(problem, hint=_PLAIN_HINT if is_plain else _HINT)


def _shown(text: bytes, other: bytes) -> str:
    """The part of a text from a little before where it differs from another one."""
    same = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, same - _SHOWN_CHARACTERS // 2)
    part = text[start : start + _SHOWN_CHARACTERS].decode(errors="replace")
    return repr(f"{'...' if start else ''}{part}")
