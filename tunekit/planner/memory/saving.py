"""Files that a run writes: checkpoints, of which the newest and the best are kept, and its result."""

import math

from tunekit.errors import PlanError
from tunekit.planner.facts import DataFacts, Facts, ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.memory.states import BYTES, Dtype, num_trainable_params, trained_bytes
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter

TOKENIZER_BYTES = 128
"""Of a tokenizer's files for each entry of its vocabulary: 134 of Llama 3, 127 of Gemma 3, 75 of Qwen 2.5."""

ROW_BYTES = 8
"""Of the rows for each token: its id and its label."""


class Saving(Facts):
    """Checkpoints of a run: when and how they are written, and the measure of the best one."""

    checkpoint_bytes: int | None = None
    """Expected bytes of a checkpoint; None in plans that do not know."""
    result_bytes: int | None = None
    """The same of the result."""
    run_bytes: int | None = None
    """The same of the run at most, with the rows and the checkpoint that is being written."""
    in_background: bool = False
    """True if a checkpoint is written during training, from a copy in main memory."""
    metric_for_best_model: str | None = None
    """None without rows to evaluate on."""
    greater_is_better: bool = False


def checkpoint_bytes(recipe: Recipe, model: ModelFacts, layout: Layout, dtype: Dtype) -> int:
    """Return the bytes of a checkpoint: weights or adapter, the states of the optimizer, and the tokenizer.

    DeepSpeed keeps the weights that it computes with and float32 copies of them; stage 3 divides both.
    """
    full = isinstance(recipe.adapter, FullAdapter)
    trained = num_trainable_params(model, recipe.adapter)
    adapters, states = trained_bytes(model, recipe.adapter, recipe.train.optim)
    weights = 4 * model.num_params if full else adapters
    if layout.strategy.startswith("zero"):
        whole = BYTES[dtype] * trained
        weights = 4 * trained + (whole if layout.strategy == "zero3" else 2 * whole)
    return weights + states + _tokenizer_bytes(model)


def result_bytes(recipe: Recipe, model: ModelFacts) -> int:
    """Return the bytes of the trained model or adapter."""
    full = isinstance(recipe.adapter, FullAdapter)
    adapters, _ = trained_bytes(model, recipe.adapter, recipe.train.optim)
    return (4 * model.num_params if full else adapters) + _tokenizer_bytes(model)


def _tokenizer_bytes(model: ModelFacts) -> int:
    return TOKENIZER_BYTES * model.vocab_size


def metric_of(recipe: Recipe, data: DataFacts) -> tuple[str | None, bool]:
    """By which measure of the evaluations the best is told, and whether the greatest is; None without evaluations.

    Raises:
        PlanError: The recipe names one, and there is nothing to evaluate on.
    """
    train = recipe.train
    if data.num_eval is None:
        for name in ("metric_for_best_model", "greater_is_better"):
            if dict(train)[name] is not None:
                raise PlanError(
                    f"train.{name}: there are no rows to evaluate on, which would tell the best checkpoint",
                    hint="give data.eval, or leave it out",
                )
        return None, False
    metric = train.metric_for_best_model
    if metric is None:
        metric = "eval_reward" if is_rewarded(recipe.method) else "eval_loss"
    greater = train.greater_is_better
    return metric, not metric.endswith("loss") if greater is None else greater


def saving_of(
    recipe: Recipe, model: ModelFacts, data: DataFacts, layout: Layout, dtype: Dtype, *, spare_bytes: int | None
) -> Saving:
    """Plan the checkpoints of a run.

    Args:
        recipe: What is asked for.
        model: The model.
        data: The rows.
        layout: How the run is spread.
        dtype: Type of the products.
        spare_bytes: Main memory that each process may still take; None where that is not known.

    Raises:
        PlanError: The recipe names a measure of evaluations that there are not, or of which nothing would be kept.
    """
    metric, greater = metric_of(recipe, data)
    if layout.why_not_resumed is not None:
        if recipe.train.metric_for_best_model is not None:
            raise PlanError(
                f"train.metric_for_best_model: {layout.name} keeps no checkpoints: {layout.why_not_resumed}",
                hint="leave it out, or choose another layout",
            )
        metric, greater = None, False
    size = checkpoint_bytes(recipe, model, layout, dtype)
    fits = spare_bytes is not None and copied_bytes(size, layout) <= spare_bytes
    num_kept = 0 if layout.why_not_resumed else recipe.train.save_total_limit + (metric is not None) + 1
    result = result_bytes(recipe, model)
    return Saving(
        checkpoint_bytes=size,
        result_bytes=result,
        run_bytes=num_kept * size + result + ROW_BYTES * (data.num_train_tokens or 0),
        in_background=divides_files(layout) and fits,
        metric_for_best_model=metric,
        greater_is_better=greater,
    )


def divides_files(layout: Layout) -> bool:
    """Return whether every process writes a part of a checkpoint, from states that can be copied."""
    nvme = "nvme" in (layout.offload_param_device, layout.offload_optimizer_device)
    return layout.why_not_resumed is None and layout.strategy not in ("single", "ddp") and not nvme


def copied_bytes(size: int, layout: Layout) -> int:
    """Main memory that each process takes for a copy of its part of a checkpoint of that size."""
    return math.ceil(size / layout.num_shards)
