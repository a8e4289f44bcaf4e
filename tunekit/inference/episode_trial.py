"""Episodes tried before training: the trainer that the recipe would build has the model call tools and act.

Turns, tools, environments, roll-out functions and rewards run in the loop of the trainer itself, so that what shows is
what a first step would learn from.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import Row
from tunekit.estimates.layout import Layout
from tunekit.methods.arguments import Parts
from tunekit.methods.tool_use import give_response_template
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.training.answers import transcript
from tunekit.training.build_trainer import check_upstream, load_frozen

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from tunekit.methods.run_trainer import RunTrainer

_ONE_STEP = Schedule(num_steps=1, steps_per_epoch=None, warmup_steps=0, eval_steps=None, save_steps=1)


@dataclass(frozen=True)
class Episode:
    """An answer of several turns.

    Attributes:
        prompt: Its messages, with what the environment added, or a text.
        text: A line for each call and each result.
        num_tokens: Tokens, with the results of tools.
        is_truncated: Whether it reached the longest length without an end.
        values: What each reward gave; None where one had nothing to say.
        num_calls: Calls that were answered.
        num_failed: Those of them that were answered by an error.
        num_broken: Calls that could not be read.
        is_lost: Whether its environment hung or ended.
        step_rewards: Reward of each step, of an environment that rewards them.
    """

    prompt: Any
    text: str
    num_tokens: int
    is_truncated: bool
    values: tuple[float | None, ...]
    num_calls: int
    num_failed: int
    num_broken: int
    is_lost: bool
    step_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class Calls:
    """Calls of all episodes.

    Attributes:
        num_episodes: Episodes.
        num_calls: Calls that were answered.
        num_failed: Those of them that were answered by an error.
        num_broken: Calls that could not be read.
        num_without: Episodes without a call.
        num_lost: Episodes or calls whose process hung or ended.
        reasons: Why they were lost.
    """

    num_episodes: int
    num_calls: int
    num_failed: int
    num_broken: int
    num_without: int
    num_lost: int
    reasons: tuple[str, ...]

    @property
    def per_episode(self) -> float:
        """Answered calls of an episode, on average."""
        return self.num_calls / self.num_episodes

    @property
    def broken_share(self) -> float:
        """Share of the calls that could not be read."""
        return self.num_broken / max(1, self.num_calls + self.num_broken)

    @property
    def failed_share(self) -> float:
        """Share of the answered calls that were answered by an error."""
        return self.num_failed / max(1, self.num_calls)


@dataclass(frozen=True)
class Played:
    """Episodes of a trial, those of a prompt one behind the other.

    Attributes:
        episodes: The episodes.
        names: Names of the rewards; that of an environment is its class.
        weights: Their weights.
        reward_seconds: Time that each took.
        seconds: Time that all took.
        num_lost: Episodes or calls whose process hung or ended.
        reasons: Why.
    """

    episodes: tuple[Episode, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    reward_seconds: tuple[float, ...]
    seconds: float
    num_lost: int
    reasons: tuple[str, ...]

    @property
    def calls(self) -> Calls:
        """Counts of calls."""
        return Calls(
            num_episodes=len(self.episodes),
            num_calls=sum(episode.num_calls for episode in self.episodes),
            num_failed=sum(episode.num_failed for episode in self.episodes),
            num_broken=sum(episode.num_broken for episode in self.episodes),
            num_without=sum(episode.num_calls + episode.num_broken == 0 for episode in self.episodes),
            num_lost=self.num_lost,
            reasons=self.reasons,
        )


@dataclass(frozen=True)
class HeldOut:
    """Settings of episodes that are evaluated, and not tried as a step of training would have them.

    Attributes:
        batch_size: Episodes at once.
        is_greedy: Whether the likeliest token is taken.
    """

    batch_size: int
    is_greedy: bool


def play(
    plan: Plan,
    method: RewardedMethod,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    on_progress: Callable[[int], None],
    *,
    seed: int,
    held_out: HeldOut | None = None,
) -> Played:
    """Have a model answer prompts in the trainer of a recipe, in this process.

    Args:
        plan: How the recipe would run.
        method: Its method.
        model: The model with its adapter.
        tokenizer: Its tokenizer.
        rows: Rows with prompts.
        on_progress: Called with the number of prompts that are answered.
        seed: Random seed of sampling.
        held_out: One episode for each row, as evaluations have them, instead of those of a first step.

    Raises:
        RunError: An environment cannot be made or reset.
    """
    from transformers import set_seed

    size = method.num_generations if held_out is None else 1
    step = plan.micro_batch_size * plan.gradient_accumulation_steps if held_out is None else held_out.batch_size
    num_prompts = min(len(rows), max(1, step // size))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(plan, method, model, tokenizer, rows, num_prompts * size, Path(folder), held_out)
        reward_seconds = _time_rewards(trainer)
        try:
            set_seed(seed)
            started = time.perf_counter()
            episodes, lost, reasons = list[Episode](), 0.0, list[str]()
            for start in range(0, len(rows), num_prompts):
                # The rows of the dataset have the numbers that episodes are seeded by.
                batch = [trainer.train_dataset[start + place] for place in range(min(num_prompts, len(rows) - start))]
                episodes += _episodes(trainer, tokenizer, [row for row in batch for _ in range(size)])
                lost += sum(trainer.metrics["train" if held_out is None else "eval"].pop("tools/lost", ()))
                reasons += trainer.lost_reasons
                on_progress(len(episodes) // size)
            seconds = time.perf_counter() - started
        finally:
            for host in trainer.tool_hosts:
                host.close()
    return Played(
        episodes=tuple(episodes),
        names=tuple(trainer.reward_func_names),
        weights=tuple(trainer.reward_weights.tolist()),
        reward_seconds=tuple(reward_seconds),
        seconds=seconds - sum(reward_seconds),
        num_lost=int(lost),
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _trainer(
    plan: Plan,
    method: RewardedMethod,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    batch_size: int,
    folder: Path,
    held_out: HeldOut | None,
) -> "RunTrainer":
    """Build the trainer of a recipe around a model and rows, for one process and without a reference."""
    from datasets import Dataset

    check_upstream(method.type)
    if method.uses_tools:
        give_response_template(tokenizer)
    args = method.trainer_args if held_out is None else {**method.trainer_args, "num_generations_eval": 1}
    method = method.model_copy(update={"beta": 0.0, "num_iterations": 1, "trainer_args": args})
    # TRL takes whole groups alone.
    micro_batch_size = -(-batch_size // method.num_generations) * method.num_generations
    alone: dict[str, Any] = {"layout": Layout(), "micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 1}
    alone |= {"gradient_checkpointing": False, "activation_offloading": False, "vllm": None, "reference": "none"}
    if held_out is not None:
        device = plan.device.model_copy(update={"kind": next(model.parameters()).device.type})
        alone |= {"autocast": False, "device": device}
    plan = plan.model_copy(update=alone)
    parts = Parts(
        train=plan.recipe.train,
        data=plan.recipe.data,
        plan=plan,
        schedule=_ONE_STEP,
        model=model,
        tokenizer=tokenizer,
        train_dataset=Dataset.from_dict({"place": list(range(len(rows)))}).with_transform(partial(_filled, rows)),
        eval_dataset=None,
        checkpoints=folder,
        callbacks=[],
        engine={},
        load_reference=partial(load_frozen, plan),
        load_teacher=partial(load_frozen, plan),
    )
    trainer: RunTrainer = import_module(f"tunekit.methods.{method.type}").build(method, parts)
    trainer.model.train(held_out is None)
    if held_out is not None and held_out.is_greedy:
        trainer.generation_config.do_sample = False
        for name in ("temperature", "top_p", "top_k", "min_p"):
            setattr(trainer.generation_config, name, None)
    return trainer


def _filled(rows: Sequence[Row], batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return columns of rows as they stand, beside those that the trainer has added."""
    chosen = [rows[place] for place in batch["place"]]
    names = dict.fromkeys(name for row in chosen for name in row)
    added = {name: values for name, values in batch.items() if name != "place"}
    return {**{name: [row.get(name) for row in chosen] for name in names}, **added}


def _time_rewards(trainer: "RunTrainer") -> list[float]:
    """Have the time of each reward of a trainer added up in a list, which is returned."""
    seconds = [0.0] * len(trainer.reward_funcs)

    def timed(place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            values = function(*args, **kwargs)
            seconds[place] += time.perf_counter() - started
            return values

        return call

    trainer.reward_funcs[:] = [timed(place, function) for place, function in enumerate(trainer.reward_funcs)]
    return seconds


def _episodes(trainer: "RunTrainer", tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Row]) -> Iterator[Episode]:
    """Yield the episodes of rows, of which the answers of a group stand one behind the other."""
    scored, logs = trainer.score_answers(rows), trainer.answer_logs
    prompts, answers = (list(logs[name])[-len(rows) :] for name in ("prompt", "completion"))
    values = [list(logs["rewards"][name])[-len(rows) :] for name in trainer.reward_func_names]
    lost = [episode.is_lost for episode in trainer.episodes or ()] or [False] * len(rows)
    steps = [episode.step_rewards for episode in trainer.episodes or ()] or [()] * len(rows)
    opening = _opening(tokenizer)
    ends = {*trainer.eos_token_ids, tokenizer.pad_token_id}
    own_masks = scored.get("tool_mask", scored["completion_mask"])
    for place, answer in enumerate(answers):
        mask = scored["completion_mask"][place].bool()
        ids = scored["completion_ids"][place][mask]
        own = ids[own_masks[place][mask].bool()]
        messages = answer if isinstance(answer, list) else []
        results = [message["content"] for message in messages if message["role"] == "tool"]
        num_read = sum(len(message.get("tool_calls") or ()) for message in messages)
        num_begun = len(opening.findall(tokenizer.decode(own))) if opening is not None else 0
        is_truncated = int(ids[-1]) not in ends
        yield Episode(
            prompt=prompts[place],
            text=transcript(answer),
            num_tokens=len(ids),
            is_truncated=is_truncated,
            values=tuple(None if each[place] != each[place] else each[place] for each in values),
            num_calls=len(results),
            num_failed=sum(str(result).startswith("{'error': ") for result in results),
            # The last call of a truncated answer is cut, and not broken.
            num_broken=max(0, num_begun - num_read - is_truncated),
            is_lost=lost[place],
            step_rewards=steps[place],
        )


def _opening(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return the pattern of how a call begins; None where the tokenizer reads no calls."""
    template = tokenizer.response_template
    if template is None:
        return None
    calls = template["fields"]["tool_calls"]
    return re.compile(calls["open_pattern"] if "open_pattern" in calls else re.escape(calls["open"]))
