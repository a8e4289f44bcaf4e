"""Rewards that were tried, as HTML: on the answers of a model, and on preference pairs."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tunekit import frontend
from webui.data_charts import table_html
from webui.words import Words

MOST_PAIRS = 10
"""Pairs that are shown."""


def trial_html(words: Words, trial: frontend.RewardTrial | frontend.PairTrial) -> str:
    """Render the values of rewards for answers."""
    return _pairs(words, trial) if isinstance(trial, frontend.PairTrial) else _answers(words, trial)


def _answers(words: Words, trial: frontend.RewardTrial) -> str:
    """Render the values for a model's answers, by reward and by row."""
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in trial.warnings())
    warnings = f"<ul class='data-warnings' role='status'>{warnings}</ul>" if warnings else ""
    keys = ("reward", "weight", "mean", "spread", "group_spread", "seconds_per_step")
    rows = "".join(
        f"<tr><th scope='row'>{escape(scored.name)}</th><td>{scored.weight:g}</td>"
        f"{_cells((scored.mean, scored.spread, scored.group_spread))}<td>{scored.seconds_per_step:.2f}</td></tr>"
        for scored in (*trial.rewards, trial.total)
    )
    table = table_html([words(f"data.{key}") for key in keys], rows)
    silent = words("data.no_signal", share=f"{trial.no_signal_share:.0%}")
    heads = [words("data.answer"), *(scored.name for scored in trial.rewards), words("data.total")]
    groups = "".join(
        _row(
            group.place,
            group.prompt,
            heads,
            "".join(_answer(words, answer) for answer in sorted(group.answers, key=lambda answer: -answer.total)),
        )
        for group in trial.groups
    )
    return f"{warnings}{table}<p class='data-soft'>{escape(silent)}</p>{groups}"


def _pairs(words: Words, trial: frontend.PairTrial) -> str:
    """Render the agreement of rewards with pairs, and the pairs that they rank the other way round."""
    keys = ("reward", "weight", "accuracy", "ties", "margin", "compared")
    rows = "".join(
        f"<tr><th scope='row'>{escape(ranking.name)}</th><td>{ranking.weight:g}</td>"
        f"{_cells((ranking.accuracy, ranking.ties, ranking.margin))}<td>{ranking.num_compared:,}</td></tr>"
        for ranking in (*trial.rewards, trial.total)
    )
    table = table_html([words(f"data.{key}") for key in keys], rows)
    sentence = words("data.confused", number=sum(pair.margin < 0 for pair in trial.pairs), pairs=len(trial.pairs))
    heads = ["", words("data.answer"), *(ranking.name for ranking in trial.rewards)]
    confused = "".join(
        _row(
            pair.place,
            pair.prompt,
            heads,
            "".join(
                f"<tr><th scope='row'>{escape(words(f'data.sequence_{side}'))}</th>"
                f"<td class='data-answer'>{escape(answer)}</td>{_cells(values)}</tr>"
                for side, answer, values in (
                    ("chosen", pair.chosen, pair.chosen_values),
                    ("rejected", pair.rejected, pair.rejected_values),
                )
            ),
        )
        for pair in trial.confused(MOST_PAIRS)
    )
    return f"{table}<p class='data-soft' role='status'>{escape(sentence)}</p>{confused}"


def _row(place: str, prompt: str, heads: Sequence[str], rows: str) -> str:
    """Render the answers to a prompt."""
    return (
        f"<article class='data-row'><header><code>{escape(place)}</code></header>"
        f"<p class='data-prompt'>{escape(prompt)}</p>{table_html(heads, rows)}</article>"
    )


def _answer(words: Words, answer: Any) -> str:
    """Render an answer, with a mark where it was cut off, and its values."""
    text = escape(answer.text.strip() or words("data.empty_answer")) + (" ✂" if answer.is_truncated else "")
    return f"<tr><td class='data-answer'>{text}</td>{_cells((*answer.values, answer.total))}</tr>"


def _cells(values: Iterable[float | None]) -> str:
    return "".join(f"<td>{'–' if value is None else f'{value:.3g}'}</td>" for value in values)
