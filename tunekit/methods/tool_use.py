"""Tools, environments and roll-out functions of a method whose answers have several turns.

TRL's GRPOTrainer runs the turns (trl 1.16, `_tool_call_loop`): it reads the calls out of what the model wrote, appends
the results, which are left out of the loss, and has the model go on, until an answer calls nothing or is as long as a
completion may be. What stands around it here:

- Tools and environments in processes of their own, with a time limit (`environments.episodes`).
- Calls are read by `tokenizer.response_template`. Where a tokenizer has none, the one among TRL's is taken that reads
  a call back as the chat template wrote it.
- A turn generates no more tokens than the longest answer has left.
- Processes that divide the weights generate together. One whose answers are complete takes part in the turns of the
  others with a prompt of one token, or they would wait for each other forever.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import Row
from tunekit.data.media.kinds import COLUMN
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.errors import DataError, DependencyError, RecipeError
from tunekit.methods.arguments import Parts
from tunekit.methods.environments.episodes import (
    EPISODE,
    Host,
    Limits,
    Seeds,
    described,
    environment_class,
    fill_lost,
    tool_functions,
    tool_methods,
)
from tunekit.methods.environments.episodes import owns_reward as class_owns_reward
from tunekit.methods.environments.host import load
from tunekit.methods.environments.tools import texts_in
from tunekit.methods.rewards.sandbox import check_sandbox
from tunekit.recipe.functions import find_function
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.on_policy import ActingMethod, RewardedMethod
from tunekit.recipe.sections.tools import PythonTool, SearchTool

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from tunekit.methods.run_trainer import RunTrainer

_HINT = "document it: a line on what it does, and `Args:` with a line per argument"


def owns_reward(method: ActingMethod) -> bool:
    """Return whether the method's environment scores its episodes."""
    environment = method.environment
    return environment is not None and class_owns_reward(_class(environment.path))


def environment_rewards(method: RewardedMethod) -> list[str]:
    """Return the names of rewards that the environment of a method gives itself."""
    environment = None if method.acting is None else method.acting.environment
    if environment is None or not class_owns_reward(loaded := _class(environment.path)):
        return []
    return [loaded.__name__]


def tool_schemas(method: ActingMethod) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools that the model is shown.

    Raises:
        RecipeError: A tool has no type hints or no docstring that says what it does.
    """
    functions = {f"method.tools: {name}": described(path) for name, (path, _) in _paths(method).items()}
    if method.environment is not None:
        methods = tool_methods(_class(method.environment.path))
        functions |= {f"method.environment: {name}": function for name, function in methods.items()}
    return [_schema(place, function) for place, function in functions.items()]


def with_tools(data: LoadedData, method: ActingMethod, tokenizer: "PreTrainedTokenizerBase") -> LoadedData:
    """Return rows whose prompts show the model the tools of the method.

    Raises:
        DataError: A prompt is a text, or has pictures or tools of its own, or the chat template has no tools.
    """
    give_response_template(tokenizer)
    schemas = tool_schemas(method)
    for tool in method.tools:
        if isinstance(tool, SearchTool):
            try:
                texts_in(tool.path)
            except ValueError as error:
                raise DataError(f"method.tools: search: {error}", hint="set path to a folder of texts") from None
        if isinstance(tool, PythonTool):
            try:
                check_sandbox()
            except DependencyError as error:
                problem = error.problem.replace("method.rewards: code", "method.tools: python")
                raise DependencyError(problem, hint=error.hint) from None

    def with_schemas(rows: Rows) -> Iterator[Row]:
        for index, row in enumerate(rows.rows):
            if not isinstance(row["prompt"], list):
                problem = f"{rows.place(index)}: prompt is plain text, which cannot show the model its tools"
                raise DataError(problem, hint="make it a list of messages")
            if row.get(COLUMN):
                problem = f"{rows.place(index)}: a prompt with images; tools are supported for text prompts only"
                raise DataError(problem, hint="remove the images, or method.tools and method.environment")
            _check_own_tools(rows, index, row)
            yield {**row, "tools": schemas}

    def shown(sources: tuple[Rows, ...]) -> tuple[Rows, ...]:
        return tuple(replace(rows, rows=RowStore(with_schemas(rows))) for rows in sources)

    return replace(data, train=shown(data.train), eval=shown(data.eval))


def check_own_tools(data: LoadedData) -> None:
    """Refuse prompts with tools of their own, which TRL's trainers that generate do not show the model.

    Raises:
        DataError: A row has some.
    """
    for rows in (*data.train, *data.eval):
        for index, row in enumerate(rows.rows):
            _check_own_tools(rows, index, row)


def _check_own_tools(rows: Rows, index: int, row: Row) -> None:
    if row.get("tools"):
        problem = f"{rows.place(index)}: the row has tools, but completions are generated without them"
        raise DataError(problem, hint="name functions in method.tools (grpo), or remove the column")


def _schema(place: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise RecipeError(f"{place}: {error}", hint=_HINT) from None
    return schema


def _class(path: str) -> type:
    cls = load(path)
    if not isinstance(cls, type):
        raise RecipeError(f"method.environment: {path} is not a class", hint="name a class with `reset`")
    if not hasattr(cls, "reset"):
        raise RecipeError(f"method.environment: {path} has no method `reset`", hint="define it")
    return cls


def _paths(method: ActingMethod) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return module and function of each tool with its settings, by the name that the model calls."""
    return {tool.name: tool.implementation(method.tool_timeout_seconds) for tool in method.tools}


@dataclass(frozen=True)
class ToolUse:
    """Tools, environment and roll-out function of a trainer.

    Attributes:
        arguments: Arguments of TRL's trainer.
        hosts: Processes that they run in.
        seeds: Seeds of episodes.
        has_environment: Whether there is an environment.
    """

    arguments: Mapping[str, Any]
    hosts: Sequence[Host]
    seeds: Seeds
    has_environment: bool

    def close(self) -> None:
        """End the processes."""
        for host in self.hosts:
            host.close()

    def rows(self, dataset: "Dataset | None") -> "Dataset | None":
        """Return rows with a number each, from which their episodes are seeded."""
        if dataset is None or not self.has_environment:
            return dataset
        return dataset.add_column(EPISODE, list(range(len(dataset))))


def tool_use(method: GRPOMethod, parts: Parts) -> ToolUse:
    """Start the processes of tools and environments, and return what TRL's trainer takes.

    Raises:
        RunError: A module cannot be imported in its process, or a class cannot be made.
    """
    limits = Limits(method.tool_timeout_seconds, method.max_tool_result_chars)
    seeds = Seeds(parts.train.seed)
    hosts: list[Host] = []
    arguments: dict[str, Any] = {}
    paths = _paths(method)
    with ExitStack() as started:
        if paths:
            hosts.append(Host("method.tools", {"tools": paths}, limits))
            started.callback(hosts[-1].close)
            arguments["tools"] = tool_functions(paths, hosts[-1])
        if method.environment is not None:
            path, settings = method.environment.path, method.environment.arguments
            hosts.append(Host("method.environment", {"path": path, "arguments": settings}, limits))
            started.callback(hosts[-1].close)
            arguments["environment_factory"] = environment_class(_class(path), hosts[-1], seeds)
        if method.rollout is not None:
            arguments["rollout_func"] = find_function(method.rollout)
        if paths or method.environment is not None:
            give_response_template(parts.tokenizer)
        started.pop_all()
    return ToolUse(arguments, hosts, seeds, method.environment is not None)


def follow_turns(trainer: "RunTrainer", use: ToolUse, method: GRPOMethod, *, divides_weights: bool) -> None:
    """Stand around the turns of a trainer's answers.

    Args:
        trainer: The trainer.
        use: Its tools and environment.
        method: Longest answer.
        divides_weights: Whether all processes have to generate at the same time.
    """
    if not use.hosts:
        return
    trainer.tool_hosts = use.hosts
    turns = _Turns(trainer, method.max_completion_length, takes_part=divides_weights)
    trainer.wrap("tool_calls", turns.follow)
    trainer.wrap("generate", turns.generate)

    def score(score_answers: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fill_lost_episodes(trainer, use, score_answers(*args, **kwargs))

    trainer.wrap("calculate_rewards", score)

    def occasion() -> int | str:
        return trainer.state.global_step if trainer.model.training else "eval"

    use.seeds.occasion = occasion


def fill_lost_episodes(trainer: "RunTrainer", use: ToolUse, rewards: Any) -> Any:
    """Give lost episodes the mean reward of their groups, and log how many there were, and rewards by turn.

    Args:
        trainer: The trainer.
        use: Its environment.
        rewards: Rewards of the answers of all processes, `(answers, rewards)`.
    """
    import torch
    from accelerate.utils import gather_object

    is_training = trainer.model.training
    episodes = trainer.episodes or ()
    # One that is lost by this question is one of those that are lost.
    own_steps = [episode.step_rewards for episode in episodes]
    own = [episode.is_lost for episode in episodes]
    counts = [(host.name, *host.counts.take()) for host in use.hosts]
    own_reasons = list(dict.fromkeys(f"{name}: {reason}" for name, _, reasons in counts for reason in reasons))
    lost, steps, reasons = own, own_steps, own_reasons
    if trainer.accelerator.num_processes > 1:
        lost, steps = gather_object(own), gather_object(own_steps)
        reasons = list(dict.fromkeys(gather_object(own_reasons)))
    trainer.lost_reasons = reasons
    when = f"step {trainer.state.global_step + 1}" if is_training else "evaluation"
    for reason in own_reasons:
        print(f"tunekit: {when}: {reason}", flush=True)
    num_lost = trainer.accelerator.reduce(
        torch.tensor(float(sum(num for _, num, _ in counts)), device=trainer.accelerator.device)
    ).item()
    metrics = trainer.metrics["train" if is_training else "eval"]
    metrics["tools/lost"].append(num_lost)
    for turn, reward in enumerate(means_by_turn(steps), start=1):
        metrics[f"rewards/turn_{turn}/mean"].append(reward)
    num_generations = trainer.num_generations if is_training else trainer.num_generations_eval
    return fill_lost(rewards, lost, num_generations)


def means_by_turn(episodes: "Sequence[Sequence[float]]") -> list[float]:
    """Return the mean reward of each turn, over the episodes that have so many.

    Args:
        episodes: Rewards of the steps of each episode.
    """
    columns = zip_longest(*episodes)
    rewards = ([value for value in column if value is not None] for column in columns)
    return [sum(values) / len(values) for values in rewards]


class _Turns:
    """Turns of the answers of one batch."""

    def __init__(self, trainer: "RunTrainer", max_completion_length: int, *, takes_part: bool) -> None:
        self._trainer = trainer
        self._max_completion_length = max_completion_length
        self._takes_part = takes_part and trainer.accelerator.num_processes > 1
        self._longest_prompt: int | None = None
        self._has_turns = True

    def follow(self, loop: Callable[..., Any], prompts: Any, prompt_ids: Any, *args: Any) -> Any:
        """Run the turns behind the first, and take part in those of other processes."""
        self._longest_prompt, self._has_turns = max(map(len, prompt_ids)), True
        try:
            result = loop(prompts, prompt_ids, *args)
            for host in self._trainer.tool_hosts:
                if host.failure is not None:
                    raise host.failure
            self._has_turns = False
            while self._takes_part and self._others_generate(goes_on=False):
                self._trainer.generate_turn([prompt_ids[0][:1]], None, {}, 1)
        finally:
            self._longest_prompt = None
        return result

    def generate(self, generate: Callable[..., Any], prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate a turn, with no more tokens than the longest answer has left; one token in turns of others."""
        if self._longest_prompt is None:
            return generate(prompt_ids, *args, **kwargs)
        if self._has_turns and self._takes_part:
            self._others_generate(goes_on=True)
        config = self._trainer.generation_config
        most = config.max_new_tokens
        remaining = self._longest_prompt + self._max_completion_length - min(map(len, prompt_ids))
        config.max_new_tokens = max(1, min(most, remaining)) if self._has_turns else 1
        try:
            return generate(prompt_ids, *args, **kwargs)
        finally:
            config.max_new_tokens = most

    def _others_generate(self, *, goes_on: bool) -> bool:
        """Return whether any process generates another turn. Called by all together."""
        import torch

        accelerator = self._trainer.accelerator
        return bool(accelerator.reduce(torch.tensor(float(goes_on), device=accelerator.device)).item())


def response_templates() -> list[Any]:
    """Return TRL's templates of how models write calls."""
    from trl import chat_template_utils

    named = vars(chat_template_utils)
    return [value for name, value in named.items() if name.endswith("_template") and isinstance(value, dict)]


def give_response_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Have a tokenizer read calls of tools in the way that its chat template writes them.

    Raises:
        DataError: The chat template writes no calls, or none of TRL's templates reads them.
    """
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    hint = "use a model whose chat template renders tools, or set another model.chat_template"
    if not supports_tool_calling(tokenizer):
        raise DataError("the chat template does not render tool calls and their results", hint=hint)
    if tokenizer.response_template is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:  # one that TRL does not know by its text
            readers = (template for template in response_templates() if _reads(tokenizer, template))
            tokenizer.response_template = next(readers, None)
    if tokenizer.response_template is None:
        raise DataError("tool calls cannot be parsed from the output of the chat template", hint=hint)
    if not is_chat_template_prefix_preserving(tokenizer):
        try:
            get_training_chat_template(tokenizer)
        except ValueError:
            problem = "the chat template renders earlier messages differently after a tool result"
            raise DataError(problem, hint=hint) from None


_CALL = {"name": "find_place", "arguments": {"name": "Oslo", "number": 7}}
_QUESTION = {"role": "user", "content": "Where?"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]}


def _reads(tokenizer: "PreTrainedTokenizerBase", template: Any) -> bool:
    """Return whether a response template reads a call as the chat template writes it."""
    from jinja2 import TemplateError

    def find_place(name: str, number: int) -> str:
        """Find a place.

        Args:
            name: Its name.
            number: Its number.
        """
        return name + str(number)

    def render(*messages: Mapping[str, Any], prompts: bool = False) -> Any:
        return tokenizer.apply_chat_template(
            list(messages), tools=[find_place], add_generation_prompt=prompts, return_dict=False
        )

    try:
        before, whole = render(_QUESTION, prompts=True), render(_QUESTION, _CALLED)
        if whole[: len(before)] != before:
            return False
        parsed = tokenizer.parse_response(whole[len(before) :], template, prefix=before, tools=[find_place])
    except (TemplateError, ValueError, TypeError, KeyError):
        return False
    calls = [call.get("function") for call in (parsed or {}).get("tool_calls") or ()]
    return calls == [_CALL]
