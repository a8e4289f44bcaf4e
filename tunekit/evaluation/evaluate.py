"""Evaluation: what a model scores on rows, metrics and tasks, beside what it scored before it was trained.

Everything that is asked is checked first. Then the model is loaded, measured, and measured again as it was before: with
its adapter disabled, or, after full fine-tuning or further training of an adapter, as the model that
the run started from. Both see the same rows, so that their difference is paired.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import ModelError
from tunekit.estimates.facts import continued_adapter
from tunekit.estimates.memory.states import Dtype
from tunekit.inference import inference_model
from tunekit.probe.model import model_folder
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.runs.evaluation_result import Evaluation, save_evaluation
from tunekit.runs.events import Event
from tunekit.runs.run import Run
from tunekit.training.measured_memory import is_out_of_memory
from tunekit.training.model_card import write_card

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunekit.evaluation.losses import Part


def evaluate(
    model: Run | str | Path,
    *,
    checkpoint: str | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    metrics: Sequence[str | Mapping[str, Any]] = (),
    tasks: Sequence[str] = (),
    include_path: str | Path | None = None,
    before: bool = True,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    batch_size: int = inference_model.BATCH_SIZE,
    seed: int = 0,
    device: inference_model.Device = "auto",
    dtype: Dtype | Literal["auto"] = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> Evaluation:
    """Evaluate a model, also as it was before training; write the scores to `evaluations/` in the run's folder.

    Without data, metrics and tasks it is measured on the rows that its run has set aside.

    Args:
        model: The run, its folder or name; or a model's folder or name.
        checkpoint: Checkpoint step of a run, instead of the result.
        data: Rows: a file, or a source as `data.eval` of a recipe has it. Their format says what is measured: a loss
            over texts, accuracy on preference pairs, or, for prompts, the metrics of the answers.
        metrics: What judges answers: names of rewards, `module:function`, or mappings as in `method.rewards`.
        tasks: Tasks of lm-evaluation-harness.
        include_path: Folder with YAML files of more tasks.
        before: Whether the model before training is evaluated too.
        limit: Rows, or documents of each task, at most; the first ones.
        num_fewshot: Few-shot examples per question. Default: as the task defines.
        apply_chat_template: Whether the chat template is applied to task questions.
        max_new_tokens: Maximum new tokens. Default: as in training, or 256.
        temperature: Sampling temperature; 0: greedy decoding.
        batch_size: Prompts per batch.
        seed: Random seed for sampling.
        device: Device of the model; `auto`: an accelerator if available.
        dtype: Data type of the weights; `auto`: as in training, or as stored.
        on_event: Called with progress: events `evaluate` with `of`, `side`, `done` and `total`.

    Raises:
        TunekitError: There is no such model, metric, task or row; or memory runs out.
    """
    began = time.time()
    trained = inference_model.find_trained(model, checkpoint)
    send_nothing_at_all()
    with library_words_to(StringIO()):
        from tunekit.evaluation.tasks import Wish, read_metrics

        where = inference_model.device_for(device)
        computed_in = inference_model.dtype_on(trained, where) if dtype == "auto" else dtype
        wish = Wish(limit, max_new_tokens, temperature, seed, batch_size, where)
        tokenizer = inference_model.tokenizer_of(trained)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        rewards = read_metrics(metrics)
        parts, notes = _parts(
            trained, tokenizer, data if not isinstance(data, Path) else str(data), rewards, tasks, wish
        )
        if tasks:
            from tunekit.evaluation.lm_eval import Harness, find_tasks

            manager = find_tasks(tasks, include_path)
            parts.append(Harness(tuple(tasks), manager, num_fewshot, limit, apply_chat_template, batch_size))
        earlier = _before(trained)
        after_values, before_values = _measured(
            trained, earlier, tokenizer, parts, before=before, dtype=computed_in, device=where, tell=on_event
        )
    scores = [
        score if before else replace(score, before=None, difference=None)
        for part, ours, theirs in zip(parts, after_values, before_values, strict=True)
        for score in part.scores(ours, theirs)
    ]
    evaluation = Evaluation(
        model=trained.name,
        step=trained.step,
        before=None if earlier is None or not any(score.before for score in scores) else earlier.name,
        what=", ".join(Path(part.of).name for part in parts),
        scores=tuple(scores),
        settings={
            "device": where,
            "dtype": computed_in,
            "limit": limit,
            "metrics": [metric.type for metric in rewards],
            "num_fewshot": num_fewshot,
            "apply_chat_template": apply_chat_template,
            "temperature": temperature,
            "seed": seed,
        },
        notes=tuple(notes),
        began=began,
        seconds=time.time() - began,
    )
    if trained.run is None:
        return evaluation
    saved, result = save_evaluation(trained.run, evaluation), trained.run.result()
    # The model's card tells of its evaluations.
    if trained.step is None and result:
        write_card(trained.run, result, trained.run.model_path)
    return saved


def _parts(
    found: inference_model.Trained,
    tokenizer: "PreTrainedTokenizerBase",
    data: str | Mapping[str, Any] | None,
    rewards: Sequence[Any],
    tasks: Sequence[str],
    wish: Any,
) -> "tuple[list[Part], tuple[str, ...]]":
    """Return the parts of the evaluation with their rows, and notes on those rows."""
    from tunekit.evaluation.tasks import parts_of_file, parts_of_run

    if data is not None:
        part, notes = parts_of_file(found, data, tokenizer, rewards, wish)
        return [part], notes
    if tasks and not rewards:
        inference_model.refuse_judges(found)
        return [], ()
    return [parts_of_run(found, tokenizer, rewards, wish)], ()


def _before(found: inference_model.Trained) -> inference_model.Trained | None:
    """Return the model before its training; None where there is none."""
    if found.judges or not found.can_compare:
        return None
    if found.before is not None:
        return found.before
    if found.run is not None:
        plan = found.run.plan
        origin = continued_adapter(plan.origin, plan.recipe.adapter)
        if origin is not None:
            return inference_model.Trained(origin.name, origin.base, origin.adapter, origin.folder)
    return inference_model.Trained(found.base.path, found.base, None, model_folder(found.base))


def _measured(
    found: inference_model.Trained,
    earlier: inference_model.Trained | None,
    tokenizer: "PreTrainedTokenizerBase",
    parts: "Sequence[Part]",
    *,
    before: bool,
    dtype: Dtype,
    device: str,
    tell: Callable[[Event], None] | None,
) -> tuple[list[Any], list[Any]]:
    """Measure each part on a model, and on its predecessor or None."""

    def all_of(of: inference_model.Trained, model: Any, side: str) -> list[Any]:
        model.config.pad_token_id = tokenizer.pad_token_id
        loaded = inference_model.Loaded(of, model, tokenizer, device, dtype)
        return [
            _measure(part, loaded, side, tell) if side == "after" or before or part.needs_before else None
            for part in parts
        ]

    wants_before = earlier is not None and (before or any(part.needs_before for part in parts))
    try:
        model: Any = inference_model.load_trained(found, dtype=dtype, device=device)
        ours = all_of(found, model, "after")
        if earlier is None or not wants_before:
            return ours, [None] * len(parts)
        if found.adapter is not None and earlier.base == found.base and earlier.adapter is None:
            with model.disable_adapter():
                return ours, all_of(found, model, "before")
        del model
        gc.collect()
        return ours, all_of(earlier, inference_model.load_trained(earlier, dtype=dtype, device=device), "before")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{found.name} does not fit in free memory"
        raise ModelError(problem, hint="pass a smaller --batch-size, --dtype bfloat16, or --device cpu") from error


def _measure(part: "Part", loaded: inference_model.Loaded, side: str, tell: Callable[[Event], None] | None) -> Any:
    def told(done: int, total: int) -> None:
        if tell is not None:
            tell({"event": "evaluate", "of": part.of, "side": side, "done": done, "total": total})

    return part.measure(loaded, told)
