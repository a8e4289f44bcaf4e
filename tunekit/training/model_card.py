"""The model card of a trained model: base, data, recipe, results.

Under which licence a base model stands, from the card that its makers gave it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tunekit.data.sources.load import is_hub_dataset
from tunekit.data.sources.rows import shown
from tunekit.estimates.facts import is_thinker
from tunekit.files import load_template
from tunekit.models.virtual_tokens import WITHOUT_CACHE
from tunekit.planner.plan import Plan
from tunekit.probe.model import HUB_SECONDS, model_folder, stored_config
from tunekit.recipe.load import dump_recipe
from tunekit.recipe.methods.spec import Judged, ScoreHead
from tunekit.recipe.reading.parse import dotted
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, PromptTuningAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.redact import redacted, with_references
from tunekit.runs.evaluation_result import Score, evaluations_of, newest_scores
from tunekit.runs.fingerprints import CODE, models_of
from tunekit.runs.run import Run

_PIPELINES: dict[Judged | None, str] = {
    None: "text-generation",
    "text": "text-classification",
    "classes": "text-classification",
    "steps": "token-classification",
}
"""The hub's names of tasks, by what a model scores."""


@dataclass(frozen=True)
class Licence:
    """A licence, in the hub's words.

    Attributes:
        id: Its name in the hub's list, such as `apache-2.0`; `other` where it is in none.
        name: Its own name, where it is in no list.
        link: Where its text is, where that was said.
    """

    id: str
    name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        name = self.id if self.name is None else self.name
        return name if self.link is None else f"{name} ({self.link})"


def licence_of(base: ModelSection, *, asks_hub: bool) -> Licence | None:
    """The licence of a model; None where its card does not tell, or there is none.

    Args:
        base: The model.
        asks_hub: Whether a card that is not on this machine may be fetched.
    """
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    card = _card_of(base, asks_hub=asks_hub)
    if card is None or not card.is_file():
        return None
    try:
        data: dict[str, Any] = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):
        return None
    licence = data.get("license")
    licence = licence[0] if isinstance(licence, list) and licence else licence
    if not isinstance(licence, str):
        return None
    name, link = (data.get(key) if isinstance(data.get(key), str) else None for key in ("license_name", "license_link"))
    return Licence(licence, name, link)


def _card_of(base: ModelSection, *, asks_hub: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = Path(model_folder(base))
    if folder.is_dir():
        return folder / "README.md"
    try:
        path = hf_hub_download(
            base.path, "README.md", revision=base.revision, local_files_only=not asks_hub, etag_timeout=HUB_SECONDS
        )
    except (HfHubHTTPError, HFValidationError, OSError):
        return None
    return Path(path)


WHOLE = ("merged", "quantized")
"""Kinds of exports that are whole weights."""


def write_card(
    run: Run,
    result: Mapping[str, Any],
    folder: Path,
    *,
    kind: Literal["trained", "adapter", "merged", "quantized"] = "trained",
    step: int | None = None,
) -> None:
    """Write README.md beside the weights.

    Args:
        run: The run.
        result: The fields of its `result` event; none where it has not finished.
        folder: Where the weights are.
        kind: What they are: what was trained, or of an adapter itself or what it was merged into.
        step: Of the checkpoint that they are from; None where they are the result, to which the figures belong.
    """
    recipe, plan = run.recipe, run.plan
    full = isinstance(recipe.adapter, FullAdapter) or kind in WHOLE
    evaluated = [score for _, score in newest_scores(evaluations_of(run), step)]
    licence = licence_of(plan.base, asks_hub=kind != "trained")
    data = _metadata(run, licence, evaluated, is_full=full)
    sources = ", ".join(shown(source.path) for source in recipe.data.sources)
    rows = [
        *([] if plan.origin is None else [("Starts from", plan.origin.chain)]),
        ("Base model", f"{plan.base.path} ({plan.num_params:,} parameters)"),
        ("License of the base model", str(licence or "not stated on its card")),
        *_code(recipe),
        *_part(plan, kind),
        *_context(plan, kind),
        *_tokens(plan, kind),
        *([("Generation", WITHOUT_CACHE)] if isinstance(recipe.adapter, PromptTuningAdapter) else []),
        ("Trained", f"{recipe.adapter.type}, {plan.num_trainable_params:,} parameters{_merged(recipe, kind)}"),
        ("Method", recipe.method.type),
        *_labels(recipe.method.score_head),
        ("Training data", f"{sources} ({plan.data.num_train:,} sequences)"),
        *_figures(result, step),
    ]
    samples = run.samples() if step is None else []
    # A cell is one line, and ends at its next bar.
    template = load_template(
        Path(__file__).with_suffix(".md.jinja"), cell=lambda text: text.replace("|", "\\|").replace("\n", " ")
    )
    card = template.render(
        metadata=data.to_yaml(),
        name=run.name,
        facts=rows,
        loss=recipe.method.loss_description,
        samples=[[sample["prompt"], sample.get("before", ""), sample.get("after", "")] for sample in samples],
        scores=[[f"{Path(one.of).name}: {one.words}", f"{one.num_rows:,}", *one.cells] for one in evaluated],
        recipe=dump_recipe(recipe),
    )
    # A card is published: what a path took from the environment may be a login that no name gives away.
    for source in sorted((*recipe.data.sources, *recipe.data.eval_sources), key=lambda source: -len(source.path)):
        for path in (source.path, shown(source.path)):
            card = card.replace(path, with_references(path))
    ModelCard(redacted(card), ignore_metadata_errors=False).save(folder / "README.md")


def _metadata(run: Run, licence: Licence | None, evaluated: Sequence[Score], *, is_full: bool) -> ModelCardData:
    """Return the metadata that the hub reads from a card: the names in it are names there."""
    recipe, base = run.recipe, run.plan.base.path
    task = _PIPELINES[recipe.method.spec.classifies]
    is_on_hub = "/" in base and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    relation = "finetune" if is_full else "adapter"
    figures = [
        EvalResult(
            task_type=task,
            dataset_type=Path(score.of).name,
            dataset_name=Path(score.of).name,
            dataset_args={"num_rows": score.num_rows},
            metric_type=score.name,
            metric_name=score.words,
            metric_value=round(score.after.value, 6),
        )
        for score in evaluated
    ]
    data_names = list(dict.fromkeys(source.path for source in recipe.data.sources if is_hub_dataset(source.path)))
    return ModelCardData(
        library_name="transformers" if is_full else "peft",
        tags=["tunekit", recipe.method.type, recipe.adapter.type],
        pipeline_tag=task,
        base_model=base if is_on_hub else None,
        base_model_relation=relation if is_on_hub else None,
        license=None if licence is None else licence.id,
        license_name=None if licence is None else licence.name,
        license_link=None if licence is None else licence.link,
        datasets=data_names or None,
        model_name=run.name if evaluated else None,
        eval_results=figures or None,
    )


def _labels(head: ScoreHead | None) -> Iterator[tuple[str, str]]:
    """Yield the names of labels in their order, which an adapter is not saved with."""
    if head is not None and head.labels:
        yield "Labels", ", ".join(f"{index} {name}" for index, name in enumerate(head.labels))


def _figures(result: Mapping[str, Any], step: int | None) -> Iterator[tuple[str, str]]:
    """Yield the results of training, as far as it trained these weights."""
    if step is not None:
        yield "Checkpoint", f"of step {step}, before the end of the run"
        return
    yield "Tokens seen", f"{result['num_tokens']:,}"
    yield "Training loss, first and last step", _from_to(result["first_loss"], result["last_loss"])
    yield "Evaluation loss, before and after", _from_to(result["first_eval_loss"], result["eval_loss"])
    yield from ((name, _from_to(first, last)) for name, (first, last) in result["measures"].items())


def _merged(recipe: Recipe, kind: str) -> str:
    if kind not in WHOLE or isinstance(recipe.adapter, FullAdapter):
        return ""
    whole = ", unquantized" if isinstance(recipe.adapter, QloraAdapter) else ""
    return f", merged into the base model{whole}"


def _code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The code that comes with the models, where it was run."""
    for key, section in models_of(recipe):
        if section.trust_remote_code:
            at = f"commit {section.revision}" if section.revision else f"as recorded in {CODE} of the run"
            yield f"Code of {dotted(key)}", f"run (trust_remote_code), {at}"


def _context(plan: Plan, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the scaling of the rotary embeddings, and what others have to do where the weights are an adapter's."""
    scaling = plan.base.rope_scaling
    if scaling is None:
        return
    method = "" if scaling.rope_type is None else f"{scaling.rope_type}, "
    words = f"rotary embeddings scaled: {method}factor {scaling.factor:g}; parameters in config.json"
    if kind not in WHOLE and not isinstance(plan.recipe.adapter, FullAdapter):
        words += (
            "; with PEFT, load the base model with that config: `AutoModelForCausalLM.from_pretrained(BASE, "
            "config=AutoConfig.from_pretrained(THIS_FOLDER))`"
        )
    yield "Context", words


def _part(plan: Plan, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the class that loads the part that was trained of a model that speaks too, which an auto class may not."""
    config = stored_config(plan.base) or {}
    architecture = next(iter(config.get("architectures") or ()), "")
    if not is_thinker(architecture):
        return
    words = f"the thinker, which reads and writes; load it with `{architecture}`"
    if kind not in WHOLE and not isinstance(plan.recipe.adapter, FullAdapter):
        words = f"{words.replace('load it', 'load the base model')}, or adapt the `thinker` of the whole model"
    yield "Part", words


def _tokens(plan: Plan, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens that were added, and what others have to do where the weights are an adapter's."""
    if not plan.new_tokens:
        return
    words = f"{len(plan.new_tokens)} added to the tokenizer: {', '.join(plan.base.all_tokens)}"
    if kind not in WHOLE and not isinstance(plan.recipe.adapter, FullAdapter):
        num = max(plan.new_tokens) + 1
        words += f"; with PEFT, resize the base model first: `model.resize_token_embeddings({num})` where "
        words += "it has fewer"
    yield "Tokens", words


def _from_to(first: float | None, last: float | None) -> str:
    return "none" if first is None or last is None else f"{first:.4f} → {last:.4f}"
