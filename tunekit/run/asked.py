"""What a model is evaluated on where it has to answer: prompts whose answers are judged by rewards, as in training.

Both sides answer the same prompts, each reward judges all answers, and a row of which a reward has nothing to say does
not count for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunekit.data.formats import Row
from tunekit.data.rows import Rows
from tunekit.errors import DataError
from tunekit.methods.rewards.load import RewardFunction
from tunekit.recipe.rewards import ExactMatchReward, MathReward, NumericMatchReward, RegexReward, Reward
from tunekit.run.evaluation import Score
from tunekit.run.held_out import Side, Values
from tunekit.run.intervals import Figure, Sample, scored
from tunekit.run.likelihood import Told

_SHARES = (ExactMatchReward, NumericMatchReward, RegexReward, MathReward)
"""Rewards that are right or wrong."""


@dataclass(frozen=True)
class Answering:
    """How prompts are answered.

    Attributes:
        max_new_tokens: Longest answer.
        temperature: How freely; 0 takes the likeliest token always.
        seed: For the draws.
        batch_size: Prompts that are answered at once.
        chat: Whether a prompt that is a text is a user's turn of a conversation.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int
    chat: bool


@dataclass(frozen=True)
class Questions:
    """Prompts, and what judges the answers.

    Attributes:
        of: The rows.
        rows: A prompt each, and the columns that rewards read.
        rewards: What judges, as a recipe has it.
        functions: The same, loaded.
        answering: How prompts are answered.
    """

    of: str
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    functions: Sequence[RewardFunction]
    answering: Answering
    needs_before: bool = False

    def measure(self, side: Side, tell: Told) -> Values:
        """What each reward gives to each answer, and how long the answers are."""
        answered = answers_of(side, [row["prompt"] for row in self.rows], self.answering, tell)
        prompts = [row["prompt"] for row in self.rows]
        columns = dict.fromkeys(name for row in self.rows for name in row if name != "prompt")
        # What TRL gives to a reward.
        batch = {
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": one.text}] if isinstance(prompt, list) else one.text
                for prompt, one in zip(prompts, answered, strict=True)
            ],
            "completion_ids": [one.ids for one in answered],
            **{name: [row.get(name) for row in self.rows] for name in columns},
            "trainer_state": _state(),
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: None,
        }
        given = {one.__name__: np.array(one(**batch), dtype=np.float64) for one in self.functions}
        return {
            **{f"rewards/{name}/mean": values for name, values in given.items()},
            "completions/mean_length": np.array([len(one.ids) for one in answered], dtype=np.float64),
            "completions/clipped_ratio": np.array([one.is_cut_off for one in answered], dtype=np.float64),
        }

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The mean of each reward, of their weighted sum where there are several, and of the answers' lengths."""
        names = [f"rewards/{function.__name__}/mean" for function in self.functions]
        figures = [
            Figure(name, function.__name__, ".1%" if isinstance(reward, _SHARES) else ".3f", higher_is_better=True)
            for name, function, reward in zip(names, self.functions, self.rewards, strict=True)
        ]
        ours, theirs = dict(after), None if before is None else dict(before)
        if len(names) > 1:
            for values in (ours, theirs):
                if values is not None:
                    values["reward"] = self._total(values, names)
            figures.insert(0, Figure("reward", "reward, summed by weight", ".3f", higher_is_better=True))
        figures += (
            Figure("completions/mean_length", "tokens of an answer", ".1f", higher_is_better=None),
            Figure("completions/clipped_ratio", "answers cut off", ".1%", higher_is_better=False),
        )
        made = []
        for figure in figures:
            samples = [None if one is None else _sample(one[figure.name]) for one in (ours, theirs)]
            if samples[0] is not None and samples[0].num_rows:
                unheard = samples[1] is not None and not samples[1].num_rows
                made.append(scored(figure, self.of, samples[0], None if unheard else samples[1]))
        return made

    def _total(self, values: Values, names: Sequence[str]) -> np.ndarray:
        weighted = [reward.weight * values[name] for reward, name in zip(self.rewards, names, strict=True)]
        return np.asarray(np.nansum(weighted, axis=0))


def _sample(values: np.ndarray) -> Sample:
    """A figure of the rows that have one."""
    known = ~np.isnan(values)
    return Sample(np.where(known, values, 0.0), known.astype(np.float64))


def _state() -> Any:
    from transformers import TrainerState

    return TrainerState()


def questions_in(rows: Rows) -> list[Row]:
    """Rows as prompts with what is expected: of a conversation the last answer, of a completion all of it.

    Raises:
        DataError: They hold nothing that can be asked.
    """
    if rows.format == "prompts":
        return list(rows.rows)
    if rows.format == "prompt_completion":
        return [{"prompt": row["prompt"], "answer": _text(row["completion"])} for row in rows.rows]
    if rows.format == "messages":
        return [_last_turn(row, rows.place(index)) for index, row in enumerate(rows.rows)]
    raise DataError(
        f"{rows.source}: rows of {rows.read_as or rows.format} hold nothing that can be asked",
        hint="name rows with a prompt and what the metric reads, such as answer",
    )


def _last_turn(row: Row, place: str) -> Row:
    messages = row["messages"]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(f"{place}: the conversation does not end with an answer", hint="leave it out, or complete it")
    rest = {name: value for name, value in row.items() if name != "messages"}
    return {"prompt": messages[:-1], "answer": messages[-1]["content"], **rest}


def _text(value: Any) -> str:
    return str(value[-1]["content"]) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Answer:
    """An answer: its tokens with its end token, its text without, and whether it reached the longest length."""

    ids: list[int]
    text: str
    is_cut_off: bool


def answers_of(side: Side, prompts: Sequence[Any], how: Answering, tell: Told) -> list[Answer]:
    """The answers of a model to prompts, in their order."""
    import torch
    from transformers import set_seed

    set_seed(how.seed)
    tokenizer, model = side.tokenizer, side.model
    ids = [prompt_ids(side, prompt, chat=how.chat) for prompt in prompts]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = _ends(model, tokenizer)
    draws: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if how.temperature > 0:
        draws = {"do_sample": True, "temperature": how.temperature, "top_p": 1.0, "top_k": 0}
    found: dict[int, Answer] = {}
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    for start in range(0, len(order), how.batch_size):
        batch = order[start : start + how.batch_size]
        longest = max(len(ids[number]) for number in batch)
        given = torch.tensor([[pad] * (longest - len(ids[number])) + ids[number] for number in batch])
        mask = torch.tensor([[0] * (longest - len(ids[number])) + [1] * len(ids[number]) for number in batch])
        with torch.inference_mode():
            made = model.generate(
                input_ids=given.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=how.max_new_tokens,
                pad_token_id=pad,
                eos_token_id=sorted(ends),
                **draws,
            )
        for number, answer in zip(batch, made[:, longest:].tolist(), strict=True):
            stop = next((place for place, token in enumerate(answer) if token in ends), None)
            kept = answer if stop is None else answer[: stop + 1]
            found[number] = Answer(kept, tokenizer.decode(kept, skip_special_tokens=True), stop is None)
        tell(len(found), len(ids))
    return [found[number] for number in range(len(ids))]


def _ends(model: Any, tokenizer: Any) -> set[int]:
    given = model.generation_config.eos_token_id
    known = given if isinstance(given, list) else [] if given is None else [given]
    return {*known, tokenizer.eos_token_id} - {None}


def prompt_ids(side: Side, prompt: Any, *, chat: bool) -> list[int]:
    """The tokens of a prompt."""
    tokenizer = side.tokenizer
    if isinstance(prompt, str) and not (chat and tokenizer.chat_template is not None):
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    made = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(made["input_ids"])
