"""The trainer of a run: the one that its recipe's method names, around the model and the rows that the folder names."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tunekit.data.alignment import read_rows
from tunekit.data.prepare import read_dataset
from tunekit.data.stream import stream
from tunekit.methods import dpo, grpo
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.adapters import FullAdapter, QloraAdapter
from tunekit.recipe.methods import DPOMethod, GRPOMethod, SFTMethod
from tunekit.recipe.schema import Recipe
from tunekit.run.place import Place
from tunekit.run.prepare import FILES, STREAM_SKIPPED
from tunekit.run.run import Run

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

MEASURES: dict[str, tuple[str, ...]] = {"dpo": dpo.MEASURES, "grpo": grpo.MEASURES}
"""What tells whether a method works besides its loss, by TRL's names."""


def load_policy(recipe: Recipe, plan: Plan, *, device: str | None) -> "PreTrainedModel":
    """The model that is trained, without the adapter that is trained; one that is not is merged into it."""
    from tunekit.model.adapters import merge_adapter
    from tunekit.model.load import load_model
    from tunekit.run.tensor_parallel import distributed_config

    model = load_model(
        plan.base,
        dtype="float32" if isinstance(recipe.adapter, FullAdapter) else plan.dtype,
        attn_implementation=plan.attn_implementation,
        device=device,
        distributed=distributed_config(plan),
        quantization=recipe.adapter if isinstance(recipe.adapter, QloraAdapter) else None,
    )
    origin = plan.origin
    if origin is None or origin.adapter is None or not origin.is_merged_for(recipe.adapter) or device == "meta":
        return model
    return merge_adapter(model, origin.adapter, Path(origin.folder))


class _Shared(TypedDict):
    """What every method builds its trainer from."""

    model: "Module"
    tokenizer: "PreTrainedTokenizerBase"
    checkpoints: Path
    callbacks: "list[TrainerCallback]"
    engine: dict[str, Any]


def build_trainer(
    run: Run,
    recipe: Recipe,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    callbacks: "list[TrainerCallback]",
    place: Place,
) -> "Trainer":
    """The trainer of the recipe's method, around a model with its adapter."""
    from tunekit.methods import sft
    from tunekit.methods.rewards.load import load_rewards
    from tunekit.run.engine import trainer_args

    folder, method = run.path / "data", recipe.method
    numbers = (recipe.train, recipe.data, plan, schedule)
    shared: _Shared = {
        "model": model,
        "tokenizer": tokenizer,
        "checkpoints": run.path / "checkpoints",
        "callbacks": callbacks,
        "engine": trainer_args(plan),
    }
    read = read_dataset if isinstance(method, SFTMethod) else read_rows
    evaluated = read(folder / FILES["eval"]) if plan.data.num_eval else None
    match method:
        case SFTMethod():
            trained = _train_dataset(folder, recipe, tokenizer, place)
            return sft.build(method, *numbers, train_dataset=trained, eval_dataset=evaluated, **shared)
        case DPOMethod():
            twice = isinstance(recipe.adapter, FullAdapter) and not method.precompute_ref_log_probs
            return dpo.build(
                method,
                *numbers,
                base=plan.base,
                reference=load_policy(recipe, plan, device=plan.device.kind) if twice else None,
                train_dataset=read(folder / FILES["train"]),
                eval_dataset=evaluated,
                **shared,
            )
        case GRPOMethod():
            return grpo.build(
                method,
                *numbers,
                base=plan.base,
                rewards=load_rewards(method.rewards),
                train_dataset=read(folder / FILES["train"]),
                eval_dataset=evaluated,
                **shared,
            )


def _train_dataset(
    folder: Path, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", place: Place
) -> "Dataset | IterableDataset":
    if not recipe.data.streaming:
        return read_dataset(folder / FILES["train"])
    from tunekit.methods import sft

    skipped = folder / STREAM_SKIPPED if place.is_main else Path(os.devnull)
    return stream(recipe.data, tokenizer, sft.LEARNER, seed=recipe.train.seed, skipped=skipped)
