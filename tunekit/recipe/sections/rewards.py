"""Rewards of answers: those that come with tunekit, and functions of the user's own.

A reward gives each answer a number. Their values are multiplied by their weights and summed. A lone word stands for a
reward with its defaults (`exact_match`), and `my_module:my_function` for a function.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import EXPANDS_ENV, FUNCTION_PATTERN, Conflict, FunctionPath, Section, from_word

Extract = Literal["all", "last_line", "last_number", "boxed", "answer_tag"]
"""Part of an answer that is compared: all of it, its last line, its last number, what stands in its last `\\boxed{}`,
or what stands between its last `<answer>` and `</answer>`."""


class FunctionReward(Section):
    """Your own reward function. `my_module:my_function` is short for it."""

    shorthand = "path"

    type: Literal["function"] = "function"
    """Your own function."""

    path: Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
    """`module:function`. Called with `prompts`, `completions` and every other column as lists; returns a number per
    completion, or None to abstain (TRL's signature)."""

    weight: float = 1.0
    """Weight of this reward in the sum."""


class _TunekitReward(Section):
    """A reward that comes with tunekit."""

    shorthand = "type"

    type: str
    """Name of the reward."""

    weight: float = 1.0
    """Weight of this reward in the sum."""


class ExactMatchReward(_TunekitReward):
    """1 if the answer equals the expected one, else 0."""

    type: Literal["exact_match"] = "exact_match"
    """The answer equals the expected text."""

    column: str = "answer"
    """Column with the expected answer."""

    extract: Extract = "all"
    """Part of the answer to compare: `all`, its `last_line`, its `last_number`, the content of its last `boxed` braces,
    or of its last `<answer>` tags (`answer_tag`)."""

    ignore_case: bool = False
    """Compare case-insensitively."""


class NumericMatchReward(_TunekitReward):
    """1 where the last number of an answer is the expected one, else 0: also as fraction, percentage or with a unit.

    `1,234.50`, `1/2`, `3 1/2`, `1.5e3` and `$5` are read as people write them. `50%` is 0.5, and also 50. Units are
    compared as text.
    """

    type: Literal["numeric_match"] = "numeric_match"
    """The number in the answer equals the expected one."""

    column: str = "answer"
    """Column with the expected number: a number, or text that ends in one."""

    extract: Extract = "last_number"
    """Part of the answer to compare, as for exact_match."""

    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Maximum relative difference from the expected number."""

    unit: str | None = None
    """Required unit after the number, such as `km`. Default: the unit of the expected answer, if any."""


class RegexReward(_TunekitReward):
    """1 if the answer matches a regular expression, else 0: a format, such as reasoning before an answer."""

    type: Literal["regex"] = "regex"
    """The answer matches a pattern."""

    pattern: Annotated[str, Field(min_length=1)]
    """Python regular expression. A dot also matches a newline; surrounding whitespace is ignored."""

    where: Literal["fullmatch", "search"] = "fullmatch"
    """Match the whole answer, or any part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a valid regular expression: {error}") from None
        return pattern


class JsonSchemaReward(_TunekitReward):
    """1 if the answer is JSON that matches a schema, else 0; 0.25 for other valid JSON."""

    type: Literal["json_schema"] = "json_schema"
    """The answer is JSON that matches a schema."""

    path: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """File with the JSON schema."""

    column: str | None = None
    """Column with a schema per row, instead of one for all."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield a conflict unless there is exactly one schema."""
        if (self.path is None) == (self.column is None):
            yield Conflict(("path",), "requires either path or column", "set exactly one of them")


class LengthReward(_TunekitReward):
    """0 for a short answer, falling to -1 for a long one (soft overlong punishment of DAPO, arXiv 2503.14476)."""

    type: Literal["length"] = "length"
    """The answer is not too long."""

    max_tokens: Annotated[int, Field(gt=0)]
    """Length in tokens at which the reward reaches -1."""

    free_tokens: Annotated[int, Field(ge=0)]
    """Length in tokens up to which the reward is 0."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield a conflict where the value has no tokens to fall over."""
        if self.free_tokens >= self.max_tokens:
            what = f"{self.free_tokens} is not less than max_tokens {self.max_tokens}"
            yield Conflict(("free_tokens",), what, "lower it: the value falls from 0 to -1 between the two")


class RepetitionReward(_TunekitReward):
    """Minus the share of repeated n-grams in an answer: 0 without repetition."""

    type: Literal["repetition"] = "repetition"
    """The answer does not repeat itself."""

    ngram_size: Annotated[int, Field(gt=0)] = 3
    """Words per n-gram."""


class MathReward(_TunekitReward):
    """1 if the answer is mathematically equal to the expected one, else 0 (math-verify)."""

    type: Literal["math"] = "math"
    """The answer is mathematically equal to the expected one."""

    column: str = "answer"
    """Column with the expected answer, in LaTeX or as an expression."""


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
    fails. Put imports and definitions that a test needs into its own statement: as separate statements they would count
    as passing tests. All other names come from the program."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Time limit for a program with all of its tests."""

    memory_mib: Annotated[int, Field(gt=0)] = 512
    """Memory limit of a program."""

    num_parallel: Annotated[int, Field(gt=0)] = 4
    """Programs to run in parallel."""


class ModelReward(_TunekitReward):
    """Score of a reward model: one trained with `method: reward` or `method: prm`, or any model with such a head.

    A sequence classifier with one output scores the whole text. A token classifier with two classes scores each step,
    by the probability of its second class; blank steps are skipped, and an answer without any gets 0.
    """

    type: Literal["reward_model"] = "reward_model"
    """Score of a reward model."""

    model: ModelSection
    """Reward model: a run's name, a folder, or a name on the Hugging Face Hub."""

    aggregation: Literal["min", "prod", "mean", "last"] = "min"
    """Score of an answer from the probabilities that its steps are good, of a process reward model."""

    step_separator: Annotated[str | None, Field(min_length=1)] = None
    """Text that divides an answer into steps, for a process reward model. Default: the one saved with the model."""


class JudgeReward(_TunekitReward):
    """Score of an LLM judge behind an OpenAI-compatible endpoint, from 0 to 1."""

    type: Literal["judge"] = "judge"
    """Score of an LLM judge."""

    base_url: Annotated[str, Field(min_length=1)]
    """URL of the endpoint, such as `http://localhost:8000/v1`."""

    model: Annotated[str, Field(min_length=1)]
    """Model name at the endpoint."""

    instruction: Annotated[str, Field(min_length=1)]
    """Grading instruction for the judge."""

    api_key_env: str | None = None
    """Environment variable with the API key. Keys do not belong in recipes."""

    max_score: Annotated[float, Field(gt=0)] = 10.0
    """Maximum score of the judge; scores are divided by it."""

    num_parallel: Annotated[int, Field(gt=0)] = 8
    """Concurrent requests."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of a request."""


_Matching = ExactMatchReward | NumericMatchReward | RegexReward | JsonSchemaReward
_Checking = LengthReward | RepetitionReward | MathReward | CodeReward
_AnyReward = FunctionReward | _Matching | _Checking | ModelReward | JudgeReward


def _spelt_out(value: Any) -> Any:
    return from_word(get_args(_AnyReward), value) if isinstance(value, str) else value


Reward = Annotated[_AnyReward, Field(discriminator="type"), BeforeValidator(_spelt_out)]
"""What judges answers, told apart by `type`."""
