"""Rewards tried on pairs of answers: which of them each reward prefers to the one that people chose."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError
from tunekit.inference.reward_trial import weighted
from tunekit.methods.rewards.answers import text_of
from tunekit.methods.rewards.load import check_rows, load_rewards, reward_arguments
from tunekit.recipe.sections.rewards import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class RankedPair:
    """A pair of answers and their rewards.

    Attributes:
        place: Location of the row.
        prompt: Its last message, or the text.
        chosen: The preferred answer.
        rejected: The other one.
        chosen_values: Each reward of the preferred answer; None where a reward returns none.
        rejected_values: Each reward of the other one.
        margin: Sum by weight of the preferred answer, less that of the other one.
    """

    place: str
    prompt: str
    chosen: str
    rejected: str
    chosen_values: Values
    rejected_values: Values
    margin: float


@dataclass(frozen=True)
class Ranking:
    """Agreement of a reward with the preferences of pairs.

    Attributes:
        name: The reward, in metrics; `sum` for all by weight.
        weight: By the recipe.
        accuracy: Share of the pairs whose preferred answer has the higher reward; None without a pair to compare.
        ties: Share of the pairs whose answers have equal rewards.
        margin: Mean difference of the rewards.
        num_compared: Pairs both of whose answers have a reward.
    """

    name: str
    weight: float
    accuracy: float | None
    ties: float | None
    margin: float | None
    num_compared: int


@dataclass(frozen=True)
class PairTrial:
    """Rewards of the answers of pairs.

    Attributes:
        pairs: The pairs, in the order of their rows.
        rewards: Each reward over all pairs.
        total: Their sum by weight over all pairs.
    """

    pairs: tuple[RankedPair, ...]
    rewards: tuple[Ranking, ...]
    total: Ranking

    def confused(self, most: int) -> list[RankedPair]:
        """Return the pairs whose rejected answer has the higher sum, the widest margin first."""
        wrong = sorted((pair for pair in self.pairs if pair.margin < 0), key=lambda pair: pair.margin)
        return wrong[:most]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def rank_pairs(
    rewards: Sequence[Reward],
    sources: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    device: str,
    num_pairs: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> PairTrial:
    """Score both answers of pairs with the rewards of a recipe.

    Args:
        rewards: The rewards.
        sources: Rows of preferences.
        tokenizer: Tokenizer of the recipe's model, whose token IDs rewards are passed.
        device: Device of reward models.
        num_pairs: The first pairs, at most.
        on_progress: Called with the number of rewards that are done.

    Raises:
        DataError: A row lacks a column that a reward reads.
        TunekitError: A reward fails, which is named with the row.
    """
    placed = ((rows.place(index), row) for rows in sources for index, row in enumerate(rows.rows))
    places, pairs = zip(*islice(placed, num_pairs), strict=True)
    if any(rows.media for rows in sources):
        raise DataError("rewards cannot be tried on pairs with images", hint="remove the images")
    check_rows(rewards, sources)
    answers = [text_of(pair[side]) for pair in pairs for side in ("chosen", "rejected")]
    batch = reward_arguments(_rows(pairs), answers, [_ids(answer, tokenizer) for answer in answers])
    functions = load_rewards(rewards, device=device)
    columns: list[list[float | None]] = []
    for function in functions:
        columns.append(function(**batch))
        if on_progress is not None:
            on_progress("rewards", len(columns), len(functions))
    weights = [reward.weight for reward in rewards]
    totals = [weighted(weights, values) for values in zip(*columns, strict=True)]
    ranked = [
        RankedPair(
            place=places[number],
            prompt=text_of(pairs[number]["prompt"]),
            chosen=answers[2 * number],
            rejected=answers[2 * number + 1],
            chosen_values=tuple(column[2 * number] for column in columns),
            rejected_values=tuple(column[2 * number + 1] for column in columns),
            margin=totals[2 * number] - totals[2 * number + 1],
        )
        for number in range(len(pairs))
    ]
    names = [function.__name__ for function in functions]
    described = zip(names, weights, columns, strict=True)
    rankings = tuple(_ranking(name, weight, column) for name, weight, column in described)
    return PairTrial(tuple(ranked), rankings, _ranking("sum", 1.0, list(totals)))


def _rows(pairs: Sequence[Row]) -> list[Row]:
    """Return a row for each answer."""
    columns = [{name: value for name, value in pair.items() if name not in ("chosen", "rejected")} for pair in pairs]
    return [row for row in columns for _ in range(2)]


def _ids(answer: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens of an answer with its end token, as a model generates it."""
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]


def _ranking(name: str, weight: float, values: Sequence[float | None]) -> Ranking:
    margins = [
        chosen - rejected
        for chosen, rejected in zip(values[::2], values[1::2], strict=True)
        if chosen is not None and rejected is not None
    ]
    if not margins:
        return Ranking(name, weight, None, None, None, 0)
    return Ranking(
        name=name,
        weight=weight,
        accuracy=statistics.fmean(margin > 0 for margin in margins),
        ties=statistics.fmean(margin == 0 for margin in margins),
        margin=statistics.fmean(margins),
        num_compared=len(margins),
    )
