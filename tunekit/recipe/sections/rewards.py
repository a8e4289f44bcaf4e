"""Rewards of answers: those that come with tunekit, and functions of the user's own.

A reward gives each answer a number. Their values are multiplied by their weights and summed. A lone word stands for a
reward with its defaults (`exact_match`), and `my_module:my_function` for a function.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import (
    EXPANDS_ENV,
    FUNCTION_PATTERN,
    Conflict,
    FunctionPath,
    Section,
    from_word,
)

Extract = Literal["all", "last_line", "last_number", "boxed", "answer_tag"]
"""Part of an answer that is compared: all of it, its last line, its last number, what stands in its last `\\boxed{}`,
or what stands between its last `<answer>` and `</answer>`."""


class FunctionReward(Section):
    """A function of your own. `my_module:my_function` alone is short for it."""

    shorthand = "path"

    type: Literal["function"] = "function"
    """A function of your own."""

    path: Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
    """`module:function`. It is called with `prompts`, `completions` and every other column of the rows, a list each,
    and returns a number for each completion, or None where it has nothing to say (TRL's signature)."""

    weight: float = 1.0
    """What its values are multiplied by before they are summed with the others."""


class _TunekitReward(Section):
    """A reward that comes with tunekit."""

    shorthand = "type"

    type: str
    """Name of the reward; each declares it anew."""

    weight: float = 1.0
    """What its values are multiplied by before they are summed with the others."""


class ExactMatchReward(_TunekitReward):
    """1 where an answer equals the expected one, else 0."""

    type: Literal["exact_match"] = "exact_match"
    """The answer is the expected text."""

    column: str = "answer"
    """Column of the rows with the expected answer."""

    extract: Extract = "all"
    """Part of an answer that is compared: `all`, its `last_line`, its `last_number`, what stands in its last `boxed`
    braces, or between its last `<answer>` tags (`answer_tag`)."""

    ignore_case: bool = False
    """Whether capital and small letters are the same."""


class NumericMatchReward(_TunekitReward):
    """1 where the last number of an answer is the expected one, else 0: also as fraction, percentage or with a unit.

    `1,234.50`, `1/2`, `3 1/2`, `1.5e3` and `$5` are read as people write them. `50%` is 0.5, and also 50. Units are
    compared as text.
    """

    type: Literal["numeric_match"] = "numeric_match"
    """The answer's number is the expected one."""

    column: str = "answer"
    """Column of the rows with the expected number: a number, or a text that ends in one."""

    extract: Extract = "last_number"
    """Part of an answer that is compared, as for exact_match."""

    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Largest difference from the expected number, as a share of it."""

    unit: str | None = None
    """Unit that must stand behind the number, such as `km`. Left out: the one of the expected answer, if it has one."""


class RegexReward(_TunekitReward):
    """1 where an answer matches a regular expression, else 0: a format, such as reasoning before an answer."""

    type: Literal["regex"] = "regex"
    """The answer has a form."""

    pattern: Annotated[str, Field(min_length=1)]
    """Regular expression of Python's. A dot also matches a line break; space around the answer does not count."""

    where: Literal["fullmatch", "search"] = "fullmatch"
    """Whether the whole answer must match, or any part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern


class JsonSchemaReward(_TunekitReward):
    """1 where a whole answer is JSON that a schema allows, else 0; a quarter where it is JSON at all."""

    type: Literal["json_schema"] = "json_schema"
    """The answer is JSON of a form."""

    path: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """File of the JSON schema."""

    column: str | None = None
    """Column of the rows with a schema each, instead of one for all."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield a conflict unless there is exactly one schema."""
        if (self.path is None) == (self.column is None):
            yield Conflict(("path",), "give either path or column", "the schema stands in one of them")


class LengthReward(_TunekitReward):
    """0 for a short answer, falling to -1 for a long one (the soft punishment of DAPO, arXiv 2503.14476)."""

    type: Literal["length"] = "length"
    """The answer is not too long."""

    max_tokens: Annotated[int, Field(gt=0)]
    """Tokens from which on an answer gets -1."""

    free_tokens: Annotated[int, Field(ge=0)]
    """Tokens up to which an answer gets 0."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield a conflict where the value has no tokens to fall over."""
        if self.free_tokens >= self.max_tokens:
            what = f"{self.free_tokens} is not less than max_tokens {self.max_tokens}"
            yield Conflict(("free_tokens",), what, "between them the value falls from 0 to -1")


class RepetitionReward(_TunekitReward):
    """Minus the share of an answer's n-grams that it has had before: 0 where none comes twice."""

    type: Literal["repetition"] = "repetition"
    """The answer does not repeat itself."""

    ngram_size: Annotated[int, Field(gt=0)] = 3
    """Words of an n-gram."""


class MathReward(_TunekitReward):
    """1 where an answer is mathematically equal to the expected one, else 0 (math-verify)."""

    type: Literal["math"] = "math"
    """The answer is equal to the expected one, however it is written."""

    column: str = "answer"
    """Column of the rows with the expected answer, in LaTeX or as an expression."""


class CodeReward(_TunekitReward):
    """Share of a row's tests that the Python program in an answer passes, in a sandbox.

    The program is the last fenced block of an answer, or all of it. It runs on Linux alone, with the standard library
    and without files, network, processes and threads. What tests compare has to be Python's own data: an object of the
    program's own class, returned where data are expected, fails the test. Classes that a test calls by a name with
    a capital (`Stack()`) are tested by their methods, `len`, items and operators with each other.
    """

    type: Literal["code"] = "code"
    """The answer is a program that passes tests."""

    column: str = "tests"
    """Column of the rows with the tests: a list of Python statements, each run after the program; one that raises
    fails. What a test imports or defines for itself stands in its own statement, or it would count as a test that
    passes; names that no test imports or defines are the program's."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Longest time for a program with all of its tests."""

    memory_mib: Annotated[int, Field(gt=0)] = 512
    """Most memory that a program may have."""

    num_parallel: Annotated[int, Field(gt=0)] = 4
    """Programs that run at the same time."""


class ModelReward(_TunekitReward):
    """What a reward model says of an answer: one that `method: reward` trained, or any with a single output."""

    type: Literal["reward_model"] = "reward_model"
    """A reward model judges."""

    model: ModelSection
    """The reward model: a run's name, a folder, or a name on the Hugging Face hub."""


class JudgeReward(_TunekitReward):
    """What a language model behind an OpenAI-compatible endpoint says of an answer, as a number from 0 to 1."""

    type: Literal["judge"] = "judge"
    """Another language model judges."""

    base_url: Annotated[str, Field(min_length=1)]
    """Address of the endpoint, such as `http://localhost:8000/v1`."""

    model: Annotated[str, Field(min_length=1)]
    """Name of the model there."""

    instruction: Annotated[str, Field(min_length=1)]
    """What the judge is told to look at."""

    api_key_env: str | None = None
    """Environment variable that holds the key. The key itself does not belong into a recipe."""

    max_score: Annotated[float, Field(gt=0)] = 10.0
    """Highest score that the judge may give; it is divided by it."""

    num_parallel: Annotated[int, Field(gt=0)] = 8
    """Requests at the same time."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for an answer."""


_AnyReward = (
    FunctionReward
    | ExactMatchReward
    | NumericMatchReward
    | RegexReward
    | JsonSchemaReward
    | LengthReward
    | RepetitionReward
    | MathReward
    | CodeReward
    | ModelReward
    | JudgeReward
)


def _spelt_out(value: Any) -> Any:
    return from_word(get_args(_AnyReward), value) if isinstance(value, str) else value


Reward = Annotated[_AnyReward, Field(discriminator="type"), BeforeValidator(_spelt_out)]
"""What judges answers, told apart by `type`."""
