"""Rewards tried before training: the model answers some prompts as it would in a run, and each reward judges.

What shows is what a run would learn from. A group is all answers to one prompt; a method that compares answers learns
nothing from a group in which all got the same.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.alignment import BARE_PROMPTS, are_bare
from tunekit.errors import DataError
from tunekit.inference.episode_trial import Calls, play
from tunekit.methods.rewards.answers import text_of
from tunekit.methods.rewards.load import load_rewards, reward_arguments
from tunekit.planner.plan import Plan
from tunekit.probe.chat_template import template_in_time
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.training.build_trainer import load_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NO_SIGNAL_SHARE, _TRUNCATED_SHARE, _BROKEN_SHARE = 0.8, 0.5, 0.2
"""From these shares on there is a warning."""


@dataclass(frozen=True)
class Answer:
    """An answer and what it got.

    Attributes:
        text: Without special tokens.
        num_tokens: With its end token.
        is_truncated: Whether it reached the longest length without an end.
        values: What each reward gave; None where one had nothing to say.
        total: Their sum by weight.
        num_calls: Calls of tools that were answered.
        is_lost: Whether its environment hung or ended, so that it has the mean reward of its group.
        step_rewards: Reward of each step of an episode, of an environment that rewards them.
    """

    text: str
    num_tokens: int
    is_truncated: bool
    values: tuple[float | None, ...]
    total: float
    num_calls: int = 0
    is_lost: bool = False
    step_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class Group:
    """A prompt with its answers.

    Attributes:
        place: Where the row stands.
        prompt: Its last message, or the text.
        answers: In the order in which they were given.
    """

    place: str
    prompt: str
    answers: tuple[Answer, ...]

    @property
    def has_signal(self) -> bool:
        """True if one answer scored higher than another."""
        totals = [answer.total for answer in self.answers]
        return max(totals) > min(totals)

    @property
    def best(self) -> Answer:
        """The answer that got most."""
        return max(self.answers, key=lambda answer: answer.total)

    @property
    def worst(self) -> Answer:
        """The answer that got least."""
        return min(self.answers, key=lambda answer: answer.total)


@dataclass(frozen=True)
class Judged:
    """Values that a reward gave.

    Attributes:
        name: Its name in metrics.
        weight: By the recipe.
        mean: Of what it gave; None where it had nothing to say of any answer.
        spread: Standard deviation over all answers.
        group_spread: The same within each group, on average.
        none_share: Share of the answers of which it had nothing to say.
        seconds_per_step: For as many answers as an optimizer step has.
    """

    name: str
    weight: float
    mean: float | None
    spread: float | None
    group_spread: float | None
    none_share: float
    seconds_per_step: float


@dataclass(frozen=True)
class RewardTrial:
    """Scores of the model's answers under the rewards of a recipe, before it is trained.

    Attributes:
        groups: Prompts with their answers.
        rewards: Each reward over all answers.
        total: Their sum by weight over all answers.
        max_completion_length: Longest answer that there could be, in tokens.
        generation_seconds_per_step: For as many answers as an optimizer step has.
        masks_truncated: Whether truncated answers are left out of the loss.
        is_bare: Whether prompts are texts that the model is given as they stand, though it has a chat template.
        calls: Calls of tools; None of a recipe without.
        rows: The tried rows, one for each group.
    """

    groups: tuple[Group, ...]
    rewards: tuple[Judged, ...]
    total: Judged
    max_completion_length: int
    generation_seconds_per_step: float
    masks_truncated: bool
    is_bare: bool
    rows: tuple[Row, ...]
    calls: Calls | None = None

    @property
    def answers(self) -> list[Answer]:
        """All answers."""
        return [answer for group in self.groups for answer in group.answers]

    @property
    def no_signal_share(self) -> float:
        """Share of the groups in which all answers got the same."""
        return sum(not group.has_signal for group in self.groups) / len(self.groups)

    @property
    def truncated_share(self) -> float:
        """Share of the answers that reached the longest length without an end."""
        return sum(answer.is_truncated for answer in self.answers) / len(self.answers)

    def telling_groups(self, most: int) -> list[Group]:
        """The groups whose best and worst answer differ most, in the order of the rows."""
        by_gap = sorted(self.groups, key=lambda group: group.worst.total - group.best.total)[:most]
        return [group for group in self.groups if group in by_gap]

    def warnings(self) -> list[str]:
        """Return warnings against training with these rewards, a sentence each."""
        return list(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.is_bare:
            yield BARE_PROMPTS
        if self.no_signal_share >= _NO_SIGNAL_SHARE:
            silent = sum(not group.has_signal for group in self.groups)
            what = "learning will be slow; use easier prompts, a larger method.num_generations, or a finer reward"
            if silent == len(self.groups):
                what = "no learning signal; fine-tune on such answers first, or use easier prompts"
            yield f"all answers have equal rewards in {silent} of {counted(len(self.groups), 'group')}: {what}"
        if self.truncated_share >= _TRUNCATED_SHARE:
            what = "; raise method.max_completion_length, or add a stop string"
            if self.masks_truncated:
                what = ", and are masked from the loss; raise method.max_completion_length"
            most = f"{self.max_completion_length:,} tokens"
            yield f"{self.truncated_share:.0%} of the answers are truncated at {most}{what}"
        if self.calls is not None:
            yield from _call_warnings(self.calls)
        for reward in self.rewards:
            if reward.mean is None:
                yield f"{reward.name} returns None for every answer"
            elif reward.spread == 0:
                yield f"{reward.name} returns {reward.mean:g} for every answer"
            if reward.seconds_per_step > max(1.0, self.generation_seconds_per_step):
                yield f"{reward.name} takes longer than generation: {reward.seconds_per_step:.1f} s per step"

    def scored_rows(self) -> list[Row]:
        """Return the tried rows with columns of what the model can do, in the order of the rows.

        `mean_reward` and `reward_std` are those of the weighted sums of a row's answers, and `difficulty` is the mean
        reward with its sign changed: rows in ascending order of it begin with the easiest. A row's own columns of these
        names are replaced.
        """
        totals = [[answer.total for answer in group.answers] for group in self.groups]
        means = [statistics.fmean(values) for values in totals]
        return [
            {**row, "mean_reward": mean, "reward_std": statistics.pstdev(values), "difficulty": -mean}
            for row, mean, values in zip(self.rows, means, totals, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, but the rows."""
        plain = asdict(replace(self, rows=()))
        del plain["rows"]
        return {
            **plain,
            "no_signal_share": self.no_signal_share,
            "truncated_share": self.truncated_share,
            "warnings": self.warnings(),
        }


def _call_warnings(calls: Calls) -> Iterator[str]:
    """Yield warnings against training with these tools."""
    if calls.num_lost:
        yield f"{counted(calls.num_lost, 'episode')} lost: {'; '.join(calls.reasons)}"
    if calls.num_without == calls.num_episodes:
        yield "no episode has a call; fine-tune on conversations with calls first"
    if calls.broken_share >= _BROKEN_SHARE:
        what = "fine-tune longer on conversations with calls, or lower method.generation.temperature"
        yield f"{calls.broken_share:.0%} of the calls cannot be read: {what}"


@dataclass(frozen=True)
class _Prompt:
    """A row whose prompt leaves room for an answer."""

    place: str
    row: Row
    ids: list[int]


def run_trial(
    plan: Plan,
    method: RewardedMethod,
    sources: Sequence[Rows],
    *,
    num_prompts: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> RewardTrial:
    """Let the model answer the first prompts, and have the answers judged.

    Args:
        plan: How the recipe would run.
        method: Its method.
        sources: Its training rows.
        num_prompts: Prompts to try, at most.
        on_progress: Called with the number of answered prompts.

    Raises:
        TunekitError: A reward fails, which is named with the row, or no prompt leaves room for an answer.
    """
    from transformers import set_seed

    from tunekit.models.load import load_tokenizer

    recipe, tokenizer = plan.recipe, load_tokenizer(plan.recipe.model)
    room = recipe.data.max_length - method.max_completion_length
    prompts = _prompts(sources, tokenizer, room, num_prompts)
    if method.has_own_loop:
        is_bare = any(are_bare(rows, tokenizer) for rows in sources)
        return _played(plan, method, prompts, tokenizer, on_progress, is_bare=is_bare)
    functions = load_rewards(method.rewards, device=plan.device.kind)
    model = cast("PreTrainedModel", load_adapted(plan, device=plan.device.kind)).eval()
    set_seed(recipe.train.seed)
    started = time.perf_counter()
    answered: list[list[list[int]]] = []
    for prompt in prompts:
        answered.append(_answer(model, tokenizer, method, prompt.ids))
        if on_progress is not None:
            on_progress("answers", len(answered), len(prompts))
    num_answers = len(prompts) * method.num_generations
    per_step = recipe.train.global_batch_size / num_answers
    generation_seconds = time.perf_counter() - started
    pairs = [(prompt.row, ids) for prompt, group in zip(prompts, answered, strict=True) for ids in group]
    rows, token_ids = zip(*pairs, strict=True)
    batch = reward_arguments(rows, tokenizer.batch_decode(token_ids, skip_special_tokens=True), token_ids)
    values, seconds = [], []
    for function in functions:
        started = time.perf_counter()
        values.append(function(**batch))
        seconds.append(time.perf_counter() - started)
    groups = _groups(prompts, batch, values, method, tokenizer.eos_token_id)
    rewards = [
        _summed_up(function.__name__, reward.weight, given, took * per_step, method.num_generations)
        for function, reward, given, took in zip(functions, method.rewards, values, seconds, strict=True)
    ]
    totals: list[float | None] = [answer.total for group in groups for answer in group.answers]
    return RewardTrial(
        groups=tuple(groups),
        rewards=tuple(rewards),
        total=_summed_up("sum", 1.0, totals, sum(seconds) * per_step, method.num_generations),
        max_completion_length=method.max_completion_length,
        generation_seconds_per_step=generation_seconds * per_step,
        masks_truncated=method.mask_truncated_completions,
        is_bare=any(are_bare(rows, tokenizer) for rows in sources),
        rows=tuple(prompt.row for prompt in prompts),
    )


def _played(
    plan: Plan,
    method: RewardedMethod,
    prompts: Sequence[_Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    on_progress: Callable[[str, int, int], None] | None,
    *,
    is_bare: bool,
) -> RewardTrial:
    """Let the model answer in the trainer of the recipe, with its tools."""

    def report(num_answered: int) -> None:
        if on_progress is not None:
            on_progress("answers", num_answered, len(prompts))

    model = load_adapted(plan, device=plan.device.kind)
    rows, seed = [prompt.row for prompt in prompts], plan.recipe.train.seed
    played = play(plan, method, model, tokenizer, rows, report, seed=seed)
    size, per_step = method.num_generations, plan.recipe.train.global_batch_size / len(played.episodes)
    answers = [
        Answer(
            text=episode.text,
            num_tokens=episode.num_tokens,
            is_truncated=episode.is_truncated,
            values=episode.values,
            total=weighted(played.weights, episode.values),
            num_calls=episode.num_calls,
            is_lost=episode.is_lost,
            step_rewards=episode.step_rewards,
        )
        for episode in played.episodes
    ]
    groups = [
        Group(prompt.place, text_of(played.episodes[start].prompt), tuple(answers[start : start + size]))
        for prompt, start in zip(prompts, range(0, len(answers), size), strict=True)
    ]
    columns = zip(*(answer.values for answer in answers), strict=True)
    described = zip(played.names, played.weights, columns, played.reward_seconds, strict=True)
    totals: list[float | None] = [answer.total for answer in answers]
    return RewardTrial(
        groups=tuple(groups),
        rewards=tuple(
            _summed_up(name, weight, list(values), seconds * per_step, size)
            for name, weight, values, seconds in described
        ),
        total=_summed_up("sum", 1.0, totals, sum(played.reward_seconds) * per_step, size),
        max_completion_length=method.max_completion_length,
        generation_seconds_per_step=played.seconds * per_step,
        masks_truncated=method.mask_truncated_completions,
        is_bare=is_bare,
        rows=tuple(prompt.row for prompt in prompts),
        calls=played.calls if method.uses_tools else None,
    )


def weighted(weights: Sequence[float], values: Sequence[float | None]) -> float:
    """Return the sum of rewards by weight."""
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True) if value is not None)


def _prompts(
    sources: Sequence[Rows], tokenizer: "PreTrainedTokenizerBase", room: int, num_prompts: int
) -> list[_Prompt]:
    prompts: list[_Prompt] = []
    for rows in sources:
        if rows.media:
            problem = f"{rows.source}: rewards cannot be tried on prompts with images"
            raise DataError(problem, hint="remove the images, or train a few steps with output.sample_prompts")
        for index, row in enumerate(rows.rows):
            if len(prompts) == num_prompts:
                return prompts
            ids = _ids(row, tokenizer)
            if len(ids) <= room:
                prompts.append(_Prompt(rows.place(index), row, ids))
    if not prompts:
        raise DataError(f"no prompt leaves room for an answer: limit {room:,} tokens", hint="raise data.max_length")
    return prompts


def _ids(row: Row, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens of a prompt, as TRL makes them."""
    if isinstance(row["prompt"], str):
        return list(tokenizer(row["prompt"])["input_ids"])
    with template_in_time("a prompt"):
        encoded = tokenizer.apply_chat_template(
            row["prompt"], tools=row.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    return list(encoded["input_ids"])


def _answer(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", method: RewardedMethod, ids: list[int]
) -> list[list[int]]:
    """The tokens of the answers to a prompt, each up to its end token."""
    import torch
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    inputs = torch.tensor([ids], device=model.device)
    config = GenerationConfig(
        **method.generation.model_dump(include={"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}),
        max_new_tokens=method.max_completion_length,
        do_sample=True,
        num_return_sequences=method.num_generations,
        stop_strings=method.generation.stop or None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=end,
        use_cache=True,
    )
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=config, tokenizer=tokenizer
        )
    answers: list[list[int]] = output[:, len(ids) :].tolist()
    answers = [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]
    for answer in answers:
        # A stop text may have ended it before others; what fills it up behind is no part of it.
        while answer and answer[-1] == tokenizer.pad_token_id != end:
            answer.pop()
    return answers


def _groups(
    prompts: list[_Prompt],
    batch: dict[str, Any],
    judged: list[list[float | None]],
    method: RewardedMethod,
    end: int | None,
) -> list[Group]:
    weights, size = [reward.weight for reward in method.rewards], method.num_generations
    answers = []
    for text, ids, values in zip(batch["completions"], batch["completion_ids"], zip(*judged, strict=True), strict=True):
        is_truncated = len(ids) == method.max_completion_length and ids[-1] != end
        answers.append(Answer(text_of(text), len(ids), is_truncated, values, weighted(weights, values)))
    return [
        Group(prompt.place, text_of(prompt.row["prompt"]), tuple(answers[place * size : (place + 1) * size]))
        for place, prompt in enumerate(prompts)
    ]


def _summed_up(
    name: str, weight: float, values: list[float | None], seconds_per_step: float, num_generations: int
) -> Judged:
    known_values = [value for value in values if value is not None]
    groups = [values[start : start + num_generations] for start in range(0, len(values), num_generations)]
    spreads = [_spread([value for value in group if value is not None]) for group in groups]
    known_spreads = [spread for spread in spreads if spread is not None]
    return Judged(
        name=name,
        weight=weight,
        mean=statistics.fmean(known_values) if known_values else None,
        spread=_spread(known_values),
        group_spread=statistics.fmean(known_spreads) if known_spreads else None,
        none_share=1 - len(known_values) / len(values),
        seconds_per_step=seconds_per_step,
    )


def _spread(values: list[float]) -> float | None:
    return statistics.pstdev(values) if values else None
