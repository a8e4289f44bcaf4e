r"""Rewards that look at the text of an answer alone: its form, its length, its repetitions, and the expected text.

What they return, besides 1 for what is right: an empty answer gets 0 of all of them, unless a pattern allows it. An
answer without the part that is compared (no `\boxed{}`, no number) gets 0.

Of structured answers the whole must be JSON, but for the space around it: a fence or a word beside it is none. What
JSON does not have (`NaN`, `Infinity`) or what is nested too deep to be read is none either.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from tunekit.errors import DependencyError, RecipeError
from tunekit.methods.rewards.answers import Answers, Judge, each
from tunekit.methods.rewards.numbers import NUMBER, Number, last_number, plain, read_number
from tunekit.recipe.sections import rewards

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_REGEX_SECONDS = 1.0
"""Longest time for a pattern on one answer. One that takes longer, by backtracking, has not matched."""

_ANY_JSON = 0.25
_BOXED = "\\boxed{"
_TAGS = ("<answer>", "</answer>")


def exact_match(section: rewards.ExactMatchReward) -> Judge:
    """1 where the part of an answer that counts is the expected text, but for the space around both."""

    def same(text: str, expected: str) -> float:
        part = extract(text, section.extract)
        if part is None:
            return 0.0
        answer, target = part.strip(), expected.strip()
        return float(answer.casefold() == target.casefold() if section.ignore_case else answer == target)

    return Judge(each(same), section.column, _expected_text)


def numeric_match(section: rewards.NumericMatchReward) -> Judge:
    """1 where the last number of an answer, or of a part of it, is the expected one, with its unit."""

    def same(text: str, expected: Number) -> float:
        part = text if section.extract == "last_number" else extract(text, section.extract)
        number = last_number(part) if part is not None else None
        unit = section.unit or expected.unit
        if number is None or (unit is not None and number.unit != unit):
            return 0.0
        return float(number.is_near(expected, section.tolerance))

    return Judge(each(same), section.column, read_number)


def _expected_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("is not text")
    if not str(value).strip():
        raise ValueError("is empty")
    return str(value)


def extract(text: str, part: rewards.Extract) -> str | None:
    """A part of an answer; None where it has none, or none that is closed."""
    match part:
        case "all":
            return text
        case "last_line":
            lines = text.split("\n")
            return next((line for line in reversed(lines) if line.strip()), None)
        case "last_number":
            numbers = list(NUMBER.finditer(plain(text)))
            return numbers[-1][0] if numbers else None
        case "boxed":
            return _boxed(text)
        case "answer_tag":
            end = text.rfind(_TAGS[1])
            start = text.rfind(_TAGS[0], 0, end) if end >= 0 else -1
            return text[start + len(_TAGS[0]) : end] if start >= 0 else None
        case _:
            assert_never(part)


def _boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}`; of nested ones the innermost. Braces in it are matched."""
    starts: list[int | None] = []
    last: tuple[int, str] | None = None
    position = 0
    while position < len(text):
        if text.startswith(_BOXED, position):
            position += len(_BOXED)
            starts.append(position)
            continue
        if text[position] == "\\":
            position += 2
            continue
        if text[position] == "{":
            starts.append(None)
        elif text[position] == "}" and starts:
            start = starts.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, text[start:position])
        position += 1
    return last[1] if last is not None else None


def regex(section: rewards.RegexReward) -> Judge:
    """1 where an answer, without the space around it, has the form of a pattern; 0 where that takes too long to say."""
    import regex as backtracking  # unlike `re` it can be told to stop

    pattern = backtracking.compile(section.pattern, backtracking.DOTALL)

    def matches(text: str, _: Any) -> float:
        look = pattern.fullmatch if section.where == "fullmatch" else pattern.search
        try:
            return float(look(text.strip(), timeout=_REGEX_SECONDS) is not None)
        except TimeoutError:
            return 0.0

    return Judge(each(matches))


def length(section: rewards.LengthReward) -> Judge:
    """0 up to so many tokens, from there in a straight line to -1; the end token counts."""
    free, most = section.free_tokens, section.max_tokens

    def score(answers: Answers) -> list[float]:
        lengths = [len(ids) for ids in answers.token_ids]
        return [-min(1.0, max(0, length - free) / (most - free)) + 0.0 for length in lengths]

    return Judge(score)


def repetition(section: rewards.RepetitionReward) -> Judge:
    """Minus the share of n-grams of words that were there before, whatever their case; 0 for an answer too short."""

    def score(text: str, _: Any) -> float:
        words = text.lower().split()
        grams = list(zip(*(words[start:] for start in range(section.ngram_size)), strict=False))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0

    return Judge(each(score))


def json_schema(section: rewards.JsonSchemaReward) -> Judge:
    """1 where an answer is JSON that a schema allows, a quarter where it is JSON at all, else 0.

    Raises:
        DependencyError: jsonschema is not installed.
        RecipeError: The file is not there, or holds no schema.
    """
    if find_spec("jsonschema") is None:
        raise DependencyError("method.rewards: json_schema needs jsonschema", hint="pip install 'tunekit[rewards]'")
    of_all = _read_file(section.path) if section.path is not None else None

    def allowed(text: str, of_row: "Validator | None") -> float:
        validator = of_all or of_row
        assert validator is not None, "the schema must be in a file or in the row"
        try:
            value = json.loads(text, parse_constant=_refuse)
            return 1.0 if validator.is_valid(value) else _ANY_JSON
        except (ValueError, RecursionError):
            return 0.0

    return Judge(each(allowed), section.column, _validator)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _read_file(path: str) -> "Validator":
    try:
        return _validator(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"method.rewards: json_schema: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"method.rewards: json_schema: {path}: {error}") from None


def _validator(value: Any) -> "Validator":
    """Return a validator for a schema, given as JSON or as its parsed value. It fetches no schemas from elsewhere."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("is not a JSON schema")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is not a JSON schema: {error.message}") from None
    validator: Validator = kind(schema, registry=Registry())
    return validator
