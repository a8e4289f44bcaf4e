"""Rewards before they are trained on, drawn by rich."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tunekit.data.formats.row_formats import counted
from tunekit.data.reports.report import visible
from tunekit.display.drawing import numbers, plain_table
from tunekit.inference.episode_trial import Calls
from tunekit.inference.reward_pairs import PairTrial
from tunekit.inference.reward_trial import Answer, Group, Judged, RewardTrial

_SHOWN_GROUPS = 3
_SHOWN_LETTERS = 400
"""Letters of an answer that are shown, from both of its ends."""


def trial_parts(trial: RewardTrial | PairTrial) -> list[RenderableType]:
    """A trial on prompts or pairs in sections."""
    return _pair_parts(trial) if isinstance(trial, PairTrial) else _answer_parts(trial)


def _answer_parts(trial: RewardTrial) -> list[RenderableType]:
    """A trial on prompts in sections: warnings, rewards, groups and lengths, then the best and worst of some groups."""
    parts: list[RenderableType] = [Text(f"warning: {warning}", style="yellow") for warning in trial.warnings()]
    parts += [""] if parts else []
    parts += [_rewards_table(trial), "", _facts_table(trial)]
    names = [reward.name for reward in trial.rewards]
    for group in trial.telling_groups(_SHOWN_GROUPS):
        parts += ["", *_group(group, names)]
    return parts


def _pair_parts(trial: PairTrial) -> list[RenderableType]:
    """A trial on pairs in sections: the rewards, then the pairs that they rank most clearly the other way round."""
    table = plain_table(
        Column("reward", overflow="fold"),
        *numbers("weight", "accuracy", "ties", "margin", "pairs", no_wrap=True),
        gap=2,
    )
    for ranking in (*trial.rewards, *([trial.total] if len(trial.rewards) > 1 else [])):
        shares = ["-" if share is None else f"{share:.0%}" for share in (ranking.accuracy, ranking.ties)]
        margin = "-" if ranking.margin is None else f"{ranking.margin:+.3f}"
        is_sum = ranking is trial.total
        table.add_row(
            "weighted sum" if is_sum else ranking.name,
            "" if is_sum else f"{ranking.weight:g}",
            *shares,
            margin,
            f"{ranking.num_compared:,}",
            style="bold" if is_sum else None,
        )
    parts: list[RenderableType] = [table]
    for pair in trial.confused(_SHOWN_GROUPS):
        parts += ["", Text.assemble((pair.place, "bold"), "  ", (_cut(pair.prompt), "dim"))]
        for word, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            parts.append(Padding(Text.assemble((word, "italic"), "\n", _cut(answer)), (0, 0, 0, 2), expand=False))
        parts.append(Padding(Text(f"margin {pair.margin:+g}", style="italic"), (0, 0, 0, 2), expand=False))
    return parts


def _rewards_table(trial: RewardTrial) -> Table:
    columns = numbers("weight", "mean", "spread", "within groups", "no value", "s per step", no_wrap=True)
    table = plain_table(Column("reward", overflow="fold"), *columns, gap=2)
    for reward in trial.rewards:
        table.add_row(reward.name, f"{reward.weight:g}", *_numbers(reward))
    if len(trial.rewards) > 1:
        table.add_row("weighted sum", "", *_numbers(trial.total), style="bold")
    return table


def _numbers(judged: Judged) -> Iterator[str]:
    for value in (judged.mean, judged.spread, judged.group_spread):
        yield "-" if value is None else f"{value:.3f}"
    yield f"{judged.none_share:.0%}" if judged.none_share else "-"
    seconds = judged.seconds_per_step
    yield "<0.001" if seconds < 0.001 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"


def _facts_table(trial: RewardTrial) -> Table:
    lengths = [answer.num_tokens for answer in trial.answers]
    silent = sum(not group.has_signal for group in trial.groups)
    of_each = len(trial.groups[0].answers)
    table = plain_table(shows_header=False)
    table.add_row("prompts", f"{len(trial.groups):,}, with {of_each} answers each")
    of_groups = f"{silent:,} of {counted(len(trial.groups), 'group')}"
    table.add_row("without signal", f"{of_groups}, whose answers all got the same reward")
    mean = sum(lengths) / len(lengths)
    table.add_row("answers", f"{min(lengths):,} to {max(lengths):,} tokens, {mean:,.0f} on average")
    limit = f"{trial.max_completion_length:,} tokens"
    table.add_row("truncated", f"{trial.truncated_share:.0%} reach {limit} without an end-of-sequence token")
    if trial.calls is not None:
        for name, words in _call_facts(trial.calls):
            table.add_row(name, words)
    table.add_row(
        "generation", f"{trial.generation_seconds_per_step:.1f} s for the answers of a step, with transformers"
    )
    return table


def _call_facts(calls: Calls) -> Iterator[tuple[str, str]]:
    """Yield facts about calls of tools."""
    without = f", {calls.num_without / calls.num_episodes:.0%} of the episodes have none" if calls.num_without else ""
    yield "calls", f"{calls.per_episode:.2f} per episode{without}"
    yield "broken calls", f"{calls.broken_share:.0%} cannot be read"
    if calls.num_failed:
        yield "failed calls", f"{calls.failed_share:.0%} were answered by an error"
    if calls.num_lost:
        yield "lost", f"{counted(calls.num_lost, 'episode')}, whose process hung or exited"


def _group(group: Group, names: list[str]) -> Iterator[RenderableType]:
    yield Text.assemble((group.place, "bold"), "  ", (_cut(group.prompt), "dim"))
    entries = [("best", group.best)] if not group.has_signal else [("best", group.best), ("worst", group.worst)]
    for word, answer in entries:
        yield Padding(_answer(word if group.has_signal else "all equal", answer, names), (0, 0, 0, 2), expand=False)


def _answer(word: str, answer: Answer, names: list[str]) -> Text:
    values = ", ".join(
        f"{name} {'-' if value is None else f'{value:g}'}" for name, value in zip(names, answer.values, strict=True)
    )
    end = ", truncated" if answer.is_truncated else ""
    if answer.step_rewards:
        end += f", by turn {', '.join(f'{reward:g}' for reward in answer.step_rewards)}"
    total = f"{answer.total:g}" + (f" ({values})" if len(names) > 1 else "")
    return Text.assemble(
        (f"{word} {total}, {counted(answer.num_tokens, 'token')}{end}", "italic"), "\n", _cut(answer.text)
    )


def _cut(text: str) -> str:
    """A text on few lines: both of its ends where it is long, and what cannot be seen made visible."""
    text = visible(text.strip())
    half = _SHOWN_LETTERS // 2
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:half]} [...] {text[-half:]}"
