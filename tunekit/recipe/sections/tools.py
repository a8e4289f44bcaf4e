"""Tools that a model calls while it answers, and environments that it acts in.

A tool is a function with type hints and a docstring, of which the chat template shows the model a JSON schema. An
environment is a class: `reset(...)` begins an episode and may return what the model sees first, its other public
methods are tools, and `get_reward()` scores the episode (the interface of TRL's `environment_factory`). A class with
`step(action)` in the way of Gymnasium or OpenEnv is one too.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.section import EXPANDS_ENV, FUNCTION_PATTERN, FunctionPath, Section, from_word

TOOLS = "tunekit.methods.environments.tools"
"""Module of the tools that come with tunekit."""


class FunctionTool(Section):
    """Your own tool. `my_module:my_function` is short for it."""

    shorthand = "path"

    type: Literal["function"] = "function"
    """Your own function."""

    path: Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
    """`module:function`. The model sees its type hints and the `Args:` of its docstring."""

    @property
    def name(self) -> str:
        """Name that the model calls."""
        return self.path.rpartition(":")[2]

    def implementation(self, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
        """Return module and function, or class, and the arguments of that."""
        return self.path, {}


class _TunekitTool(Section):
    """A tool that comes with tunekit."""

    shorthand = "type"

    type: str
    """Name of the tool."""

    @property
    def name(self) -> str:
        """Name that the model calls."""
        return self.type

    def implementation(self, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
        """Return module and function, or class, and the arguments of that."""
        return f"{TOOLS}:{self.type}", {}


class CalculatorTool(_TunekitTool):
    """`calculator(expression)`: arithmetic."""

    type: Literal["calculator"] = "calculator"
    """Evaluates an arithmetic expression."""


class PythonTool(_TunekitTool):
    """`python(code)`: runs a program in the sandbox of the reward `code`, and returns what it prints."""

    type: Literal["python"] = "python"
    """Runs Python in the sandbox of the reward `code`."""

    memory_mib: Annotated[int, Field(gt=0)] = 512
    """Memory limit of a program."""

    def implementation(self, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
        """Return module and class, and its arguments: a program ends a little before the call would."""
        return f"{TOOLS}:Python", {"memory_mib": self.memory_mib, "timeout_seconds": 0.9 * timeout_seconds}


class SearchTool(_TunekitTool):
    """`search(query)`: finds passages in a folder of texts by their words (BM25)."""

    type: Literal["search"] = "search"
    """Searches a folder of texts."""

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """Folder with `.txt` and `.md` files; a passage is a paragraph."""

    num_results: Annotated[int, Field(gt=0)] = 3
    """Passages per search."""

    def implementation(self, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
        """Return module and class, and its arguments."""
        return f"{TOOLS}:Search", {"path": self.path, "num_results": self.num_results}


_AnyTool = FunctionTool | CalculatorTool | PythonTool | SearchTool


def _spelt_out(value: Any) -> Any:
    return from_word(get_args(_AnyTool), value) if isinstance(value, str) else value


Tool = Annotated[_AnyTool, Field(discriminator="type"), BeforeValidator(_spelt_out)]
"""A tool, told apart by `type`."""

ENVIRONMENTS = {
    "guess_number": "tunekit.methods.environments.guess_number:GuessNumber",
    "priced_sums": "tunekit.methods.environments.priced_sums:PricedSums",
    "adventure": "tunekit.methods.environments.adventure:Adventure",
}
"""Environments that come with tunekit, by their names in recipes."""


class ClassEnvironment(Section):
    """Your own environment. `my_module:MyEnvironment` is short for it."""

    shorthand = "path"

    type: Literal["class"] = "class"
    """Your own class."""

    path: Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
    """`module:Class` with `reset`, tools as its other public methods, and `get_reward`; or with `reset` and `step`."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return self.kwargs


class _TunekitEnvironment(Section):
    """An environment that comes with tunekit."""

    shorthand = "type"

    type: str
    """Name of the environment."""

    @property
    def path(self) -> str:
        """Module and class."""
        return ENVIRONMENTS[self.type]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        raise NotImplementedError


class GuessNumberEnvironment(_TunekitEnvironment):
    """A number to guess from `higher` and `lower`. Reward: 1, less 0.1 for each wrong guess."""

    type: Literal["guess_number"] = "guess_number"
    """Guess a number from hints."""

    highest: Annotated[int, Field(gt=1)] = 15
    """Largest number; the smallest is 1."""

    num_guesses: Annotated[int, Field(gt=0)] = 4
    """Maximum number of guesses per episode."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return {"highest": self.highest, "num_guesses": self.num_guesses}


class PricedSumsEnvironment(_TunekitEnvironment):
    """Sums with a calculator that has a price. Whether the answer is right, a reward says (`numeric_match`)."""

    type: Literal["priced_sums"] = "priced_sums"
    """Sums with a calculator whose use costs reward."""

    price: Annotated[float, Field(ge=0)] = 0.2
    """Reward deducted per use of the calculator."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return {"price": self.price}


class AdventureEnvironment(_TunekitEnvironment):
    """A text adventure: find the key in a house, then the locked door. Reward: 1 for leaving, less for detours."""

    type: Literal["adventure"] = "adventure"
    """A small text adventure."""

    num_rooms: Annotated[int, Field(ge=3)] = 5
    """Number of rooms of the house."""

    num_moves: Annotated[int, Field(gt=0)] = 12
    """Maximum number of moves per episode."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return {"num_rooms": self.num_rooms, "num_moves": self.num_moves}


_TunekitEnvironments = GuessNumberEnvironment | PricedSumsEnvironment | AdventureEnvironment
_AnyEnvironment = ClassEnvironment | _TunekitEnvironments


def _class_spelt_out(value: Any) -> Any:
    return from_word(get_args(_AnyEnvironment), value) if isinstance(value, str) else value


Environment = Annotated[_AnyEnvironment, Field(discriminator="type"), BeforeValidator(_class_spelt_out)]
"""An environment, told apart by `type`."""
