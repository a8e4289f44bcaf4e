"""Before a run: rows become the token ids and labels that it will train on, counted, and the recipe is completed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tunekit.data.cache import Entry, prepare_rows
from tunekit.data.load import LoadedData, Rows
from tunekit.data.remote import is_url, without_user
from tunekit.data.rows import Skipped
from tunekit.model.load import load_tokenizer
from tunekit.planner.facts import DataFacts
from tunekit.recipe.schema import DataSection, DataSource, Recipe

NUM_SAMPLE_PROMPTS = 3
"""Prompts taken from the rows where the recipe names none."""


@dataclass(frozen=True)
class Prepared:
    """Tokenised rows and what was counted in them."""

    train: Entry
    eval: Entry | None
    facts: DataFacts
    skipped: tuple[Skipped, ...]
    """Bad rows that were left out."""
    notes: tuple[str, ...]
    """What was found and decided on the way, a sentence each."""

    def save(self, folder: Path) -> None:
        """Put the tokens where the processes of the run read them, and beside them what was left out."""
        self.train.link_into(folder / "train")
        if self.eval is not None:
            self.eval.link_into(folder / "eval")
        if self.skipped:
            lines = (json.dumps(asdict(skipped), ensure_ascii=False) + "\n" for skipped in self.skipped)
            (folder / "skipped.jsonl").write_text("".join(lines), encoding="utf-8")


def prepare(recipe: Recipe, data: LoadedData) -> Prepared:
    """Tokenise, mask and pack the rows, or find them in the cache.

    Raises:
        DataError: No token would be trained on, or the rows do not fit the chat template.
    """
    tokenizer = load_tokenizer(recipe.model)
    section: DataSection = recipe.data

    def sequences(rows: Rows) -> Entry:
        return prepare_rows(
            rows, tokenizer, max_length=section.max_length, loss_on=section.loss_on, packing=section.packing
        )

    train = sequences(data.train)
    held_out = None if data.eval is None else sequences(data.eval)
    report = train.report
    notes = [*data.notes, *report.notes, *(held_out.report.notes if held_out else ())]
    facts = DataFacts(
        num_train=train.num_sequences,
        num_eval=None if held_out is None else held_out.num_sequences,
        tokenized=True,
        format=data.train.format,
        num_train_tokens=report.num_tokens,
        num_trainable_tokens=report.num_trainable_tokens,
        longest_tokens=report.longest_tokens,
        num_truncated=report.num_truncated,
        num_split=report.num_split,
        num_dropped=report.num_dropped,
    )
    return Prepared(train, held_out, facts, data.skipped, tuple(dict.fromkeys(notes)))


def record(recipe: Recipe, data: LoadedData) -> Recipe:
    """The recipe as the run folder keeps it: paths absolute, the sample prompts named."""
    section = recipe.data.model_copy(
        update={
            "train": _absolute_source(recipe.data.train),
            "eval": _absolute_source(recipe.data.eval) if recipe.data.eval else None,
        }
    )
    model_path = recipe.model.path if recipe.model.path == "pico" else _absolute(recipe.model.path)
    model = recipe.model.model_copy(update={"path": model_path, "chat_template": _absolute(recipe.model.chat_template)})
    prompts = recipe.output.sample_prompts
    if prompts is None:
        prompts = _prompts(data.eval if data.eval is not None else data.train)
    output = recipe.output.model_copy(update={"sample_prompts": prompts})
    return recipe.model_copy(update={"model": model, "data": section, "output": output})


def _absolute_source(source: DataSource) -> DataSource:
    if is_url(source.path):
        # What a run writes down is shown to others, so it keeps no password.
        return source.model_copy(update={"path": without_user(source.path)})
    path = _absolute(source.path)
    if path == source.path and any(sign in path for sign in "*?["):
        path = str(Path(path).resolve())
    return source.model_copy(update={"path": path})


def _absolute(path: str | None) -> str | None:
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def _prompts(rows: Rows) -> list[str]:
    """The first different prompts of the rows: first user turns, or prompts that are plain text."""
    prompts: dict[str, None] = {}
    for row in rows.rows:
        prompt = None
        if rows.format == "messages":
            prompt = next((turn["content"] for turn in row["messages"] if turn["role"] == "user"), None)
        elif rows.format == "prompt_completion" and isinstance(row["prompt"], str):
            prompt = row["prompt"]
        if prompt:
            prompts.setdefault(prompt)
        if len(prompts) == NUM_SAMPLE_PROMPTS:
            break
    return list(prompts)
